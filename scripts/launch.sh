#!/usr/bin/env bash
# What train.sbatch starts with srun: `launch.sh torchrun FLAGS` once a node, or `launch.sh srun FLAGS` once a rank. FLAGS are pretrain_gpt.py's.
# Reads MASTER_ADDR, MASTER_PORT, RANKS_PER_NODE, PYTHON, FAILURES (a file that failing tasks add their exit codes to), LOGS (a folder for what each
# rank writes, or nothing) and Slurm's own variables. It runs inside the container, where there is one, so that signals reach the ranks themselves.
set -u
# train.sbatch repeats SIGUSR1: it must not kill a rank that has no handler yet.
trap '' USR1
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
way=$1
shift

export PYTHONUNBUFFERED=1
# Compiled kernels stay on the node, and are there after a requeue: thousands of ranks would hammer a shared home directory.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/triton-cache-$(id -u)}
mkdir -p -m 700 "$TRITON_CACHE_DIR"
if [ ! -O "$TRITON_CACHE_DIR" ]; then
    echo "$TRITON_CACHE_DIR on $(hostname) belongs to another user: set TRITON_CACHE_DIR to a folder of your own on the node" >&2
    exit 2
fi

# torch's allocator grows its segments instead of adding new ones: sizes that differ from step to step (documents, evaluation, gathered weights) leave
# no holes that nothing fits into. torch knows the setting by two names; nothing is set where either is.
if [ -z "${PYTORCH_ALLOC_CONF+set}${PYTORCH_CUDA_ALLOC_CONF+set}" ]; then
    export PYTORCH_ALLOC_CONF=expandable_segments:True
fi
# NCCL starts operations of different communicators in the order in which the program gives them, the same on all ranks of each: two that are in
# flight cannot take each other's multiprocessors in different orders on two GPUs and wait for ever. Below CUDA 12.3 NCCL would carry out one after
# the other instead, and messages that cross between two stages would hang; so only where the driver knows that version, of which it is asked.
look='import ctypes; v = ctypes.c_int(); ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(v)); print(v.value)'
cuda=$("$PYTHON" -S -c "$look" 2>/dev/null)
if [[ $cuda =~ ^[0-9]{4,6}$ ]] && [ "$cuda" -ge 12030 ]; then
    export NCCL_LAUNCH_ORDER_IMPLICIT=${NCCL_LAUNCH_ORDER_IMPLICIT-1}
fi

# Both signals ask for a checkpoint. Which processes Slurm sends them to depends on its plugins, so a rank may get one twice, or before it can
# handle it: SIGTERM too is ignored from here on. (Its handlers replace this; a second signal falls back to this.)
trap '' TERM
tee=
if [ -n "${LOGS:-}" ]; then
    (umask g-w,o-rwx && mkdir -p "$LOGS") || exit 2
fi
if [ "$way" = torchrun ]; then
    [ -z "${LOGS:-}" ] || logs=(--tee 3 --log-dir "$LOGS/node-$SLURM_NODEID")  # each line in the job's log then names its rank
    export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank ${rank}] '
    # seconds that ranks get to save at SIGTERM, of 30 by default; torch 2.11 does not read it. Slurm kills them when their time is over.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
    "$PYTHON" "$root/scripts/torchrun.py" ${logs[@]+"${logs[@]}"} --nnodes "$SLURM_STEP_NUM_NODES" --node-rank "$SLURM_NODEID" --nproc-per-node "$RANKS_PER_NODE" \
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$root/pretrain_gpt.py" "$@" &
    ranks() { cat "/proc/$child/task/$child/children"; }  # torchrun passes SIGTERM on to them, SIGUSR1 not
else
    if [ -n "${LOGS:-}" ]; then
        exec {out}> >(umask g-w,o-rwx && exec tee -a "$LOGS/rank-$SLURM_PROCID.log")
        tee=$!
    else
        exec {out}>&1
    fi
    "$PYTHON" "$root/pretrain_gpt.py" "$@" >&"$out" 2>&1 {out}>&- &
    ranks() { echo "$child"; }
fi
child=$!
[ -z "$tee" ] || exec {out}>&-
trap 'interrupted=yes; kill -USR1 $(ranks)' USR1
trap 'interrupted=yes; kill -TERM "$child"' TERM
interrupted=yes
while [ -n "$interrupted" ] || kill -0 "$child" 2>/dev/null; do  # a signal ends `wait`, not the child; one that follows another does so later
    interrupted=
    wait "$child"
    code=$?
done
wait "$child" 2>/dev/null  # the child's own code, where the last `wait` ended by a signal just as the child did
again=$?
[ "$again" -eq 127 ] || code=$again
for _ in {1..100}; do  # the last words of the rank are in the log before Slurm ends the rest of the task
    [ -n "$tee" ] && kill -0 "$tee" 2>/dev/null || break
    sleep 0.1
done
[ "$code" -eq 0 ] || echo "$code task $SLURM_PROCID on $SLURMD_NODENAME" >>"$FAILURES"  # srun knows only the highest code of all tasks
exit "$code"
