#!/usr/bin/env bash
# Checks the nodes of a job before it trains: what `srun` starts, once a rank, with pretrain_gpt.py's flags and those of tools/preflight.py.
# train.sbatch does so with PREFLIGHT=1; by hand, inside an allocation:
#   srun --nodes=2 --ntasks-per-node=8 bash scripts/preflight.sh FLAGS
# Reads PYTHON, and MASTER_ADDR and MASTER_PORT where they are set. It runs inside the container, where there is one. docs/howto/network.md describes it.
set -u
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# the run's own (launch.sh), so that they are looked at
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/triton-cache-$(id -u)}
exec "${PYTHON:-python}" "$root/tools/preflight.py" --node "${SLURMD_NODENAME:-$(hostname)}" "$@"
