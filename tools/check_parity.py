"""Bug or rounding noise? Trains the same short run in two layouts, in float64 on CPU processes of
this machine, and compares everything that it logs:

    python tools/check_parity.py --layout "tp2 sp" --layout "tp1 dp2" <the flags of your run>

A layout is words: tpN, cpN, dpN, ppN, a schedule of the pipeline (gpipe, 1f1b, interleaved,
zero-bubble, zero-bubble-v), vN (virtual stages on each pipeline rank), auto (stages of equal cost),
sp (sequence parallelism), a2a, allgather, p2p or a2aN+p2p (--cp-comm-type), epN and etpN (experts),
paired (--overlap-moe-expert-parallel-comm), zeroN (a ZeRO stage), shardN (--zero-shard-size), kept
(--zero3-keep-gathered), offload (the optimizer on the host), param-offload (weights too), serial
(no data-parallel communication overlaps), mapping (--use-tp-pp-dp-mapping). Your flags are kept,
except that the run has the given layout, stops after --steps iterations, computes in float64 and
sums and keeps nothing in bf16, does not save, load, evaluate or use trackers, and logs metrics
(with the parameter norm) every iteration. Shrink the model with further flags (--num-layers 2); the
last of two equal flags counts. In float64 rounding is far below the gate, so what differs by more
is a bug. Exit code: 0 noise, 1 bug, 2 a run failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

if not __package__:  # run as a file of a checkout
    import _checkout  # noqa: F401

from megatron.tools.compare_runs import Rows, computed_rows, differences  # noqa: E402

from megatron.config.arguments import dump_config, parse_arguments  # noqa: E402
from megatron.config.errors import UserError
from megatron.config.groups import CheckpointConfig, Config, LoggingConfig, PrecisionConfig
from megatron.config.streams import escape_unencodable  # noqa: E402
from megatron.config.validate import resolve  # noqa: E402
from megatron.parallel.schedule import BUILDERS  # noqa: E402

PROGRAM = find_spec("pretrain_gpt").origin  # its file, in a checkout and where it is installed
# relative; float64 rounds at 1e-16, a run of some steps stays orders below this, and no bug does
GATE = 1e-10
SWITCHES = {
    "sp": "--sequence-parallel",
    "serial": "--no-overlap-grad-reduce --no-overlap-param-gather",
    "mapping": "--use-tp-pp-dp-mapping",
    "auto": "--pipeline-model-parallel-layout auto",
    "kept": "--zero3-keep-gathered",
    "a2a": "--cp-comm-type a2a",
    "allgather": "--cp-comm-type allgather",
    "p2p": "--cp-comm-type p2p",
    "offload": "--optimizer-cpu-offload",
    "param-offload": "--param-cpu-offload",
    "paired": "--overlap-moe-expert-parallel-comm",
    **{name: f"--pipeline-schedule {name}" for name in BUILDERS},
}
SIZES = {
    "tp": "--tensor-model-parallel-size",
    "cp": "--context-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "v": "--num-virtual-stages-per-pipeline-rank",
    "zero": "--zero-stage",
    "shard": "--zero-shard-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
}


class Words(NamedTuple):
    """The settings of a layout."""

    ranks: int
    flags: tuple[str, ...]
    tp: int
    cp: int
    dp: int
    pp: int


def read_layout(text: str) -> Words:
    """`tp2 sp pp2 zero-bubble dp2`. UserError for a word that is none."""
    sizes, flags, levels = {"tp": 1, "cp": 1, "dp": 1, "pp": 1}, [], 0
    for word in text.split():
        if match := re.fullmatch(r"(tp|cp|dp|pp|v|zero|shard|ep|etp)([1-9]\d*)", word):
            sizes[match[1]] = int(match[2])
        elif word in SWITCHES:
            flags += SWITCHES[word].split()
        elif match := re.fullmatch(r"a2a([1-9]\d*)\+p2p", word):
            levels = int(match[1])
        else:
            raise UserError(
                f"--layout {text!r}: {word!r} is none of tpN, cpN, dpN, ppN, vN, zeroN, shardN, "
                f"epN, etpN, a2aN+p2p, {', '.join(SWITCHES)}"
            )
    if levels:
        ring = str(max(1, sizes["cp"] // levels))
        sizes_of_levels = "--hierarchical-context-parallel-sizes", str(levels), ring
        flags += ["--cp-comm-type", "a2a+p2p", *sizes_of_levels]
    given = [
        part for name, flag in SIZES.items() if name in sizes for part in (flag, str(sizes[name]))
    ]
    tp, cp, dp, pp = (sizes[name] for name in ("tp", "cp", "dp", "pp"))
    return Words(tp * cp * dp * pp, (*given, *flags), tp, cp, dp, pp)


def shortened(config: Config, steps: int, layouts: list[str]) -> Config:
    """The user's run for a few steps in float64, alike for all layouts. The learning-rate schedule
    stays that of the whole run.
    """
    training = config.training
    batch = training.global_batch_size
    # by default it would follow the layout
    if batch is None and training.micro_batch_size is not None:
        batch = training.micro_batch_size * math.lcm(
            *(read_layout(layout).dp for layout in layouts)
        )
    return dataclasses.replace(
        config,
        precision=PrecisionConfig(fp64=True),
        optimizer=dataclasses.replace(
            config.optimizer,
            main_grads_dtype="fp32",
            exp_avg_dtype="fp32",
            exp_avg_sq_dtype="fp32",
            param_cpu_offload=False,  # a word of a layout
        ),
        training=dataclasses.replace(
            training, global_batch_size=batch, exit_interval=steps, exit_duration_in_mins=None
        ),
        evaluation=dataclasses.replace(config.evaluation, eval_iters=0, skip_train=False),
        checkpoint=CheckpointConfig(),
        logging=LoggingConfig(log_interval=1, log_params_norm=True),
        distributed=type(config.distributed)(
            distributed_timeout_minutes=config.distributed.distributed_timeout_minutes
        ),
    )


def train(layout: str, config_file: Path, folder: Path) -> Path:
    """Run one layout; its metrics file. RuntimeError with the output of a run that failed."""
    ranks, flags, *_ = read_layout(layout)
    metrics = folder / f"{layout.replace(' ', '-')}.jsonl"
    command = [PROGRAM, "--config", str(config_file), "--metrics-file", str(metrics), *flags]
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if ranks > 1
        else []
    )
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
    }
    done = subprocess.run(
        [sys.executable, *launcher, *command],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise RuntimeError(
            f"{layout}: `{shlex.join(command)}` on {ranks} rank(s) ended with exit code "
            f"{done.returncode}:\n{done.stdout[-4000:]}"
        )
    return metrics


def rows_of_layouts(layouts: list[str], flags: list[str], steps: int) -> list[Rows]:
    """Train two layouts, both of which are valid: the logged rows of each. Raises UserError."""
    if len(layouts) != 2:
        raise UserError(f"--layout: expected two, got {len(layouts)}")
    config = shortened(parse_arguments(flags).config, steps, layouts)
    with tempfile.TemporaryDirectory(prefix="check_parity_") as folder:
        file = Path(folder, "config.json")
        file.write_text(dump_config(config))
        for layout in layouts:
            ranks, words, *_ = read_layout(layout)
            try:
                resolve(parse_arguments(["--config", str(file), *words]).config, ranks, None)
            except UserError as error:
                raise UserError(f"--layout {layout!r} on {ranks} rank(s): {error}") from None
        return [computed_rows(str(train(layout, file, Path(folder)))) for layout in layouts]


def main(argv: list[str] | None = None) -> int:
    escape_unencodable()
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--layout", action="append", required=True, metavar="WORDS", help="give it twice"
    )
    parser.add_argument("--steps", type=int, default=20, help="iterations to compare (default 20)")
    arguments, flags = parser.parse_known_args(argv)
    try:
        rows = rows_of_layouts(arguments.layout, flags, arguments.steps)
    except (UserError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    faults, largest = differences(*rows, GATE)
    a, b = arguments.layout
    for name, (difference, iteration) in largest.items():
        if difference > 0:
            print(
                f"  {name}: largest relative difference {difference:.3g}, at iteration {iteration}"
            )
    if faults:
        print(
            f"BUG: A ({a}) and B ({b}) are different runs, float64 rounding cannot explain "
            f"it; first difference: {faults[0]}"
        )
        return 1
    worst, name = max((difference, name) for name, (difference, _) in largest.items())
    print(
        f"NOISE: {a} and {b} are the same run to a relative {worst:.2g} ({name}) in float64 "
        f"over {len(rows[0])} iterations (gate {GATE:g}); "
        "differences between them in your precision are rounding."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
