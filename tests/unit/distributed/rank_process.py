"""One rank of a job, for test_processes.py, started by torchrun.

It ends as pretrain_gpt.py does, and prints what it saw as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist

import megatron.training.pretrain
import pretrain_gpt
from megatron.distributed.groups import Layout
from megatron.distributed.setup import choose_device, connect, disconnect, make_groups, read_launch


def main(config, _notes, **_: object) -> int:
    launch = read_launch()
    device, backend = choose_device(launch, config.distributed)
    connect(launch, backend, config.distributed.distributed_timeout_minutes, config.to_dict())
    groups = make_groups(Layout(dp=launch.world_size))
    total = torch.ones((), device=device) + launch.rank
    dist.all_reduce(total, group=groups.world.group)
    made = [
        axis.group._get_backend(device).options
        for axis in (groups.world, groups.dense.shard_gather)
        if axis.group is not None
    ]
    shown = {
        "rank": launch.rank,
        "launcher": launch.launcher,
        "sum": total.item(),
        "threads": torch.get_num_threads(),
        "timeouts": [options._timeout.total_seconds() for options in made],
    }
    time.sleep(0.5 * launch.rank)  # rank 0 is the first that wants to leave
    print(json.dumps(shown), flush=True)
    disconnect()
    return 0


megatron.training.pretrain.pretrain = main
FLAGS = """--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8
--micro-batch-size 1 --train-iters 1 --lr 0.1 --mock-data --tokenizer-type NullTokenizer
--vocab-size 9 --distributed-timeout-minutes 0.5"""
sys.exit(pretrain_gpt.main(FLAGS.split()))
