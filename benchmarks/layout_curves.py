"""The quickstart's model trained in very different layouts: do the curves lie on each other?

    bash scripts/quickstart.sh                       # once: the token file
    python benchmarks/layout_curves.py --out docs/results/layout_curves.json \\
        --picture docs/images/layout_curves.svg

Every layout trains the same 600 steps in fp32 from the same seed: one process; eight processes with
tensor, sequence, pipeline and data parallelism and ZeRO-2; four with ZeRO-3. They add the same
numbers in different orders, so that their losses part by rounding, which training multiplies from
step to step. How much that alone comes to is shown by one process with another micro-batch size.
The losses of every step are kept, with all their digits. Processes are torchrun's, one thread each.
Runs that the file holds are kept, so that with a whole one only the picture is drawn again.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a file: this folder's `kernels` and `data` must hide no package
    sys.path[0] = str(ROOT)

from megatron.benchmarks import convergence, training
from megatron.benchmarks.peers.common import TrainedWork

BASE = "1 process"
CONTROL = "1 process, micro-batch 8"


@dataclass(frozen=True)
class Layout:
    """How many processes, the flags that lay the model over them, and the colour of the curve."""

    processes: int
    micro_batch: int
    data_parallel: int
    flags: str
    colour: str


LAYOUTS = {
    BASE: Layout(1, 4, 1, "", "#1e293b"),
    CONTROL: Layout(1, 8, 1, "", "#94a3b8"),
    "8 processes: tp2 sp, pp2 zero-bubble, dp2 ZeRO-2": Layout(
        8,
        1,
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--pipeline-schedule zero-bubble --zero-stage 2",
        "#dc6803",
    ),
    "4 processes: dp4 ZeRO-3": Layout(4, 2, 4, "--zero-stage 3", "#2563eb"),
}


def command_of(layout: Layout, work: TrainedWork, data: Path, tokenizer: Path) -> list[str]:
    """A layout's whole run; without --save."""
    accumulation = work.step_samples // (layout.micro_batch * layout.data_parallel)
    work = replace(
        work,
        micro_batch=layout.micro_batch,
        data_parallel=layout.data_parallel,
        accumulation=accumulation,
        warmup=1,  # a line of the metrics for every step
    )
    flags = convergence.our_flags(work, "Llama", data, tokenizer)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    launcher = [*torchrun, str(layout.processes)] if layout.processes > 1 else []
    program = str(ROOT / "pretrain_gpt.py")
    return [sys.executable, *launcher, program, *flags, *layout.flags.split()]


def run(name: str, work: TrainedWork, data: Path, tokenizer: Path) -> dict:
    """The losses of one layout's run. Raises RuntimeError when it fails."""
    command = command_of(LAYOUTS[name], work, data, tokenizer)
    return {"layout": name, **convergence.our_curve(command, work)}


def differences(runs: list[dict]) -> dict[str, list[float]]:
    """Of every layout but the first: |loss - the first one's| at each step."""
    base = next(run for run in runs if run["layout"] == BASE)["losses"]
    return {
        run["layout"]: [abs(a - b) for a, b in zip(run["losses"], base, strict=True)]
        for run in runs
        if run["layout"] != BASE
    }


# ---- the picture ---------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, TOP, HEIGHT, GAP = 900, 64, 16, 34, 250, 58  # pixels
LEAST = 1e-7  # the foot of the logarithmic axis: the rounding of an fp32 loss


def curve(values: list[float], y_of, colour: str, width: float) -> str:
    """A polyline over the steps; y_of: value -> pixels."""
    scale = (WIDTH - LEFT - RIGHT) / max(len(values) - 1, 1)
    points = " ".join(f"{LEFT + scale * i:.1f},{y_of(value):.1f}" for i, value in enumerate(values))
    return (
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}" '
        'stroke-linejoin="round"/>'
    )


def label(x: float, y: float, text: str, anchor: str = "start", colour: str = "#475569") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{text}</text>'


def panel(top: float, title: str, marks: dict[str, float], steps: int) -> list[str]:
    """Title, axes and their marks ({text: pixels from the top of the picture})."""
    parts = [label(LEFT, top - 12, title, colour="#1e293b")]
    for text, y in marks.items():
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e2e8f0"/>')
        parts.append(label(LEFT - 8, y + 4, text, "end"))
    for step in range(0, steps + 1, max(1, steps // 6)):
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / steps
        parts.append(label(x, top + HEIGHT + 18, str(step), "middle"))
    return parts


def draw(document: dict) -> str:
    """An SVG: the losses of all layouts on each other, and below their distances from one process,
    the mean of ten steps each.
    """
    runs = document["runs"]
    steps = len(runs[0]["losses"])
    least = min(min(run["losses"]) for run in runs)
    most = max(max(run["losses"]) for run in runs)
    second = TOP + HEIGHT + GAP

    def loss_y(value: float) -> float:
        return TOP + HEIGHT * (most - value) / (most - least)

    def distance_y(value: float) -> float:
        decades = -math.log10(LEAST)
        return second + HEIGHT * min(1.0, -math.log10(max(value, LEAST)) / decades)

    whole = {str(value): loss_y(value) for value in range(math.ceil(least), int(most) + 1)}
    parts = panel(TOP, "training loss of every step, nats per token", whole, steps)
    for i, run in enumerate(runs):  # wide below narrow, so that all can be seen
        width = 1 + 2.2 * (len(runs) - 1 - i)
        parts.append(curve(run["losses"], loss_y, LAYOUTS[run["layout"]].colour, width))
    decades = {f"1e{power}": distance_y(10.0**power) for power in range(0, -8, -1)}
    title = "distance from one process, mean of ten steps (log scale)"
    parts += panel(second, title, decades, steps)
    for name, values in differences(runs).items():
        means = [
            sum(part) / len(part) for part in (values[i : i + 10] for i in range(0, steps, 10))
        ]
        parts.append(curve(means, distance_y, LAYOUTS[name].colour, 1.6))
    bottom = second + HEIGHT + 44
    for i, run in enumerate(runs):
        x, y = LEFT + (i % 2) * 330, bottom + 20 * (i // 2)
        colour = LAYOUTS[run["layout"]].colour
        parts.append(f'<path d="M{x} {y - 4}h24" stroke="{colour}" stroke-width="3"/>')
        parts.append(label(x + 32, y, run["layout"], colour="#1e293b"))
    height = bottom + 20 * ((len(runs) + 1) // 2)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">'
    )
    background = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return "\n".join([head, background, *parts, "</svg>", ""])


def main() -> None:
    parser = convergence.curves_parser(str(__doc__))
    steps = convergence.WORK.steps
    parser.add_argument("--steps", type=int, default=steps, help="fewer only to try it out")
    parser.add_argument("--picture", type=Path, help="SVG")
    args = parser.parse_args()
    document = {
        "started": datetime.now().isoformat(timespec="seconds"),
        "machine": training.machine(),
        "steps": args.steps,
        "runs": [],
    }
    if args.out.exists():
        document = json.loads(args.out.read_text())
        if document["steps"] != args.steps:
            raise SystemExit(f"{args.out} holds runs of other steps: give another --out")
    work = convergence.shortened(args.steps)
    for name in LAYOUTS:
        if not any(run["layout"] == name for run in document["runs"]):
            found = run(name, work, args.data.resolve(), args.tokenizer_model.resolve())
            document["runs"].append(found)
            args.out.write_text(json.dumps(document) + "\n")
            print(f"{name}: validation loss {found['validation_loss']:.6f}", flush=True)
    for name, values in differences(document["runs"]).items():
        print(f"{name}: at most {max(values):.2e} from one process")
    if args.picture:
        args.picture.write_text(draw(document))


if __name__ == "__main__":
    main()
