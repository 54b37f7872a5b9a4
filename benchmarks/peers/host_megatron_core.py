"""megatron-core's side of benchmarks/host_time.py: megatron_core.py's run, with its shims, in one
process, which takes its steps as turns.py defines.
"""

from __future__ import annotations

import megatron_core
import torch
import torch.distributed as dist
from common import parse_work
from megatron.core.pipeline_parallel import schedules
from turns import Turns


def main() -> None:
    work, start = parse_work()
    torch.set_num_threads(work.threads)
    dist.init_process_group("gloo")
    training, turns = megatron_core.Training(work, start), Turns()
    schedules.forward_step = turns.timed("forward", schedules.forward_step)
    schedules.backward_step = turns.timed("backward", schedules.backward_step)
    training.optimizer.step = turns.timed("optimizer", training.optimizer.step)
    for step in turns:
        turns.note(training.step(step))


if __name__ == "__main__":
    main()
