#!/usr/bin/env bash
# Runs all tests in the pinned environment (.venv, made on the first run). Arguments go to pytest: `bash scripts/test.sh tests/unit/data -x`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"
exec "$python" -m pytest "$@"
