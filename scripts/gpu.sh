#!/usr/bin/env bash
# Measurements and tests that need a GPU, in windows of at most 8 minutes, one script of scripts/gpu/ each:
#   bash scripts/gpu.sh --list          the scripts and which of them have a result in docs/results/gpu/
#   bash scripts/gpu.sh                 the next one without a result
#   bash scripts/gpu.sh NAME [STAGE ...]
# Results go to OUT (gpu-results/NAME), and the record of a whole script on a GPU to docs/results/gpu/NAME.json, that of `peers MODEL`
# to peers-MODEL.json there. PYTHON names the interpreter whose torch sees the GPU (python3).
# docs/howto/gpu_window.md has what each script decides, and which wheels to carry.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
python="${PYTHON:-python3}"
scripts="$("$python" scripts/gpu/stages.py list)" || exit 2
if [ "${1:-}" = --list ]; then
  echo "$scripts"
  exit
fi
name="${1:-$("$python" scripts/gpu/stages.py next)}"
if [ -z "$name" ]; then
  echo "every script has a result in docs/results/gpu/; name one to run it again"
  exit
fi
if [ ! -e "scripts/gpu/$name.sh" ] || [ "$name" = common ]; then
  echo "$name is not one of the scripts:" >&2
  echo "$scripts" >&2
  exit 2
fi
if [ -z "${REHEARSE:-}" ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "torch of $python sees no GPU; set PYTHON to an interpreter that does, or REHEARSE=1 to try the script with tiny sizes" >&2
  exit 2
fi
export OUT="${OUT:-gpu-results/$name}"
bash "scripts/gpu/$name.sh" "${@:2}" || exit
# a rehearsal, and a part of a script, is no result; a model of `peers` has a whole window
result="$name"
[ $# -ne 2 ] || [ "$name" != peers ] || result="peers-$2"
if [ -z "${REHEARSE:-}" ] && { [ $# -lt 2 ] || [ "$result" != "$name" ]; }; then
  cp "$OUT/$name.json" "docs/results/gpu/$result.json" || exit
  echo "recorded in docs/results/gpu/$result.json"
fi
