"""The quickstart's model trained dense and as a mixture of 8 experts, 2 for each token, at equal
active FLOPs: what is the loss at equal tokens, and what balances the experts?

    bash scripts/quickstart.sh                       # once: the token file
    python benchmarks/expert_curves.py --out docs/results/expert_curves.json \\
        --picture docs/images/expert_curves.svg

Every run is `pretrain_gpt.py` on one thread, in fp32, over the same text, with the same batch and
schedule. Runs of one seed read the same samples in the same order. An expert is half as wide as the
dense MLP, so that a token goes through as many elements of matrices in both, but for the router's.
The mixture is trained with an auxiliary loss, with the bias that needs none, and with nothing that
balances it, which shows what the other two are for. With the bias scores are sigmoids, as
DeepSeek-V3 has them; otherwise a softmax of the chosen logits. Validation losses, training losses
and the loads of each layer are kept. Runs that the file holds are kept, so that with a whole one
only the picture is drawn again.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a file: this folder's `kernels` and `data` must hide no package
    sys.path[0] = str(ROOT)

import numpy as np
from megatron.benchmarks import convergence, training
from megatron.benchmarks.layout_curves import GAP, HEIGHT, LEFT, RIGHT, TOP, WIDTH, label
from megatron.benchmarks.peers.common import TrainedWork
from megatron.tools._report.metrics_file import read_metrics

from megatron.config.arguments import parse_arguments
from megatron.config.validate import resolve
from megatron.data.loader import FileReader, build_data
from megatron.data.tokenizer import build_tokenizer
from megatron.model.arithmetic import active_parameters, flops_per_iteration, parameter_count
from megatron.observe.metrics import Metrics

DENSE = "dense"
EXPERTS, TOPK = 8, 2
EVALUATIONS, LOGGED = 6, 10  # LOGGED: steps between lines of the metrics
LAST = 100  # steps whose mean loads are those of the end
SEEDS = 2
LAYER_LOAD = re.compile(r"expert-load-(max|min)/layers\.(\d+)")


@dataclass(frozen=True)
class Kind:
    """A model and what balances its experts: flags, and the colour of its curves."""

    flags: str
    colour: str


def mixture(flags: str, colour: str) -> Kind:
    """A kind whose layers all have experts that are half as wide as the dense MLP."""
    width = convergence.WORK.ffn // TOPK
    shape = f"--num-experts {EXPERTS} --moe-router-topk {TOPK} --moe-ffn-hidden-size {width}"
    return Kind(f"{shape} --moe-per-layer-logging {flags}", colour)


KINDS = {
    DENSE: Kind(f"--ffn-hidden-size {convergence.WORK.ffn}", "#1e293b"),
    "auxiliary loss": mixture("--moe-aux-loss-coeff 0.01", "#2563eb"),
    "bias": mixture(
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias", "#dc6803"
    ),
    "nothing": mixture("", "#94a3b8"),
}


def flags_of(kind: str, work: TrainedWork, data: Path, tokenizer: Path) -> list[str]:
    """`pretrain_gpt.py`'s flags for a run, without --save."""
    flags = convergence.our_flags(work, "Llama", data, tokenizer)
    more = f"--eval-interval {work.steps // EVALUATIONS} --log-interval {LOGGED}"
    return [*flags, *more.split(), *KINDS[kind].flags.split()]


def sizes(kind: str, work: TrainedWork, data: Path, tokenizer: Path) -> dict[str, float]:
    """By the program's own arithmetic: parameters, those that a token goes through, and floating-
    point operations of forward and backward pass for a token.
    """
    flags = flags_of(kind, work, data, tokenizer)
    model = resolve(parse_arguments(flags).config, 1, work.vocab).config.model
    return {
        "parameters": parameter_count(model, work.vocab)["total"],
        "active_parameters": active_parameters(model, work.vocab),
        "flops_per_token": flops_per_iteration(model, 1, work.seq, work.vocab) / work.seq,
    }


def unigram_loss(work: TrainedWork, data: Path, tokenizer: Path) -> float:
    """Nats per token of the validation samples under the frequencies of tokens in the training
    text, each counted once more: the loss of a model that knows nothing of what came before.
    """
    config = parse_arguments(flags_of(DENSE, work, data, tokenizer)).config
    found = build_data(config, build_tokenizer(config.data))
    assert found.train is not None and isinstance(found.train.reader, FileReader)
    [stream] = found.train.reader.streams
    [held_out] = found.valid.values()
    tokens = stream.dataset.tokens[stream.begin : stream.begin + stream.num_tokens]
    labels = held_out.batch(0, convergence.EVALUATED * work.step_samples).labels
    return cross_entropy(np.asarray(tokens), labels, work.vocab)


def cross_entropy(tokens: np.ndarray, labels: np.ndarray, vocab: int) -> float:
    """Mean of -log p over labels, where p(t) is the share of t among the tokens, each of the
    vocabulary counted once more.
    """
    counts = np.bincount(tokens.ravel(), minlength=vocab) + 1
    return float(-np.log(counts / counts.sum())[labels].mean())


def kept(rows: Iterable[Metrics]) -> dict[str, list]:
    """Of a run's metrics: [step, loss] of the training text and of the validation samples, and
    [step, greatest loads, least loads] of the experts of each layer, as multiples of the mean.
    """
    found: dict[str, list] = {"training": [], "validation": [], "loads": []}
    for row in rows:
        step = int(row["iteration"])
        for name, metric in (("training", "lm loss"), ("validation", "lm loss validation")):
            if metric in row:
                found[name].append([step, round(row[metric], 5)])
        loads: dict[str, dict[int, float]] = {"max": {}, "min": {}}
        for metric, value in row.items():
            if match := LAYER_LOAD.fullmatch(metric):
                loads[match[1]][int(match[2])] = round(value, 3)
        if loads["max"]:
            greatest, least = ([values[i] for i in sorted(values)] for values in loads.values())
            found["loads"].append([step, greatest, least])
    return found


def run(kind: str, work: TrainedWork, data: Path, tokenizer: Path) -> dict:
    """One training run from start to end. Raises RuntimeError when it fails."""
    flags = flags_of(kind, work, data, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags, "--save", folder]
        lines, facts = training.watched(command, work.threads, OMP_WAIT_POLICY="passive")
        if facts["exit_code"]:
            raise training.failed(command, lines, facts["exit_code"])
        found = kept(read_metrics(folder))
    assert found["validation"][-1][0] == work.steps, f"the last step was not evaluated: {command}"
    cpu = round(lines[-1][1], 1)
    return {"kind": kind, "seed": work.seed, **found, "cpu_seconds": cpu, **facts}


# ---- what the tables show ------------------------------------------------------------------------


def final_losses(runs: Iterable[dict], kind: str) -> dict[int, float]:
    """The last validation loss of each seed."""
    return {run["seed"]: run["validation"][-1][1] for run in runs if run["kind"] == kind}


def less(runs: Iterable[dict], kind: str, dense: Mapping[int, float]) -> list[float]:
    """Of each seed that both have: the last validation loss less that of the dense model, which is
    given by seed.
    """
    return [loss - dense[seed] for seed, loss in final_losses(runs, kind).items() if seed in dense]


def worst(loads: list) -> list[tuple[int, float, float]]:
    """(step, greatest, least) load of any layer's experts."""
    return [(step, max(greatest), min(least)) for step, greatest, least in loads]


def end_loads(run: dict) -> tuple[float, float] | None:
    """The greatest and the least load of any layer, means over the logged steps of the last LAST;
    None without experts.
    """
    if not run["loads"]:
        return None
    end = run["loads"][-1][0]
    _, greatest, least = zip(*(each for each in worst(run["loads"]) if each[0] > end - LAST))
    return statistics.mean(greatest), statistics.mean(least)


# ---- the picture ---------------------------------------------------------------------------------


def curve(points: Iterable[tuple[float, float]], colour: str) -> str:
    """A polyline; points in pixels."""
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="1.5" '
        'stroke-linejoin="round"/>'
    )


def panel(top: float, title: str, across: dict[str, float], up: dict[str, float]) -> list[str]:
    """Title and axes; their marks are {text: pixels}."""
    parts = [label(LEFT, top - 12, title, colour="#1e293b")]
    for text, y in up.items():
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e2e8f0"/>')
        parts.append(label(LEFT - 8, y + 4, text, "end"))
    last = [*across][-1]
    for text, x in across.items():
        parts.append(label(x, top + HEIGHT + 18, text, "end" if text == last else "middle"))
    return parts


def draw(document: dict) -> str:
    """An SVG: validation losses by tokens, and below the load of the busiest expert by step; a
    curve for each seed.
    """
    runs, steps, tokens = document["runs"], document["steps"], document["step_tokens"]
    losses = [loss for run in runs for _, loss in run["validation"]]
    low, high = math.floor(5 * min(losses)) / 5, math.ceil(5 * max(losses)) / 5
    second = TOP + HEIGHT + GAP

    def x_of(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / steps

    def loss_y(value: float) -> float:
        return TOP + HEIGHT * (high - value) / (high - low)

    def load_y(value: float) -> float:  # from 1 to all tokens
        return second + HEIGHT * (EXPERTS / TOPK - value) / (EXPERTS / TOPK - 1)

    fifths = [steps * i // 5 for i in range(6)]
    by_tokens = {f"{step * tokens // 1000:,}k": x_of(step) for step in fifths}
    by_step = {str(step): x_of(step) for step in fifths}
    up = {f"{i / 5:.1f}": loss_y(i / 5) for i in range(round(5 * low), round(5 * high) + 1)}
    parts = panel(TOP, "validation loss, nats per token, by tokens of training", by_tokens, up)
    title = "tokens of the busiest expert of any layer, as a multiple of the mean, by step"
    up = {str(value): load_y(value) for value in range(1, EXPERTS // TOPK + 1)}
    parts += panel(second, title, by_step, up)
    for run in runs:
        colour = KINDS[run["kind"]].colour
        parts.append(curve(((x_of(s), loss_y(loss)) for s, loss in run["validation"]), colour))
        if run["loads"]:
            loads = worst(run["loads"])
            parts.append(curve(((x_of(s), load_y(most)) for s, most, _ in loads), colour))
    return framed([*parts, *legend(second + HEIGHT + 44)], second + HEIGHT + 60)


def legend(y: float) -> list[str]:
    """Names next to their colours."""
    parts, width = [], (WIDTH - LEFT - RIGHT) // len(KINDS)
    for i, (kind, each) in enumerate(KINDS.items()):
        x = LEFT + i * width
        name = kind if kind == DENSE else f"experts, {kind}"
        parts.append(f'<path d="M{x} {y - 4}h24" stroke="{each.colour}" stroke-width="3"/>')
        parts.append(label(x + 32, y, name, colour="#1e293b"))
    return parts


def framed(parts: list[str], height: float) -> str:
    """The whole file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">'
    )
    background = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return "\n".join([head, background, *parts, "</svg>", ""])


# ---- the program ---------------------------------------------------------------------------------


def missing(runs: list[dict], seeds: int) -> list[tuple[str, int]]:
    """(kind, seed) that are still to be run, all kinds of a seed before the next one."""
    done = {(run["kind"], run["seed"]) for run in runs}
    wanted = [(kind, seed) for seed in range(1, seeds + 1) for kind in KINDS]
    return [each for each in wanted if each not in done]


def measure(document: dict, args: argparse.Namespace, work: TrainedWork) -> None:
    """Run what is missing, a few at a time; the file is written after each."""
    files = args.data.resolve(), args.tokenizer_model.resolve()
    document["unigram_loss"] = unigram_loss(work, *files)
    document["sizes"] = {kind: sizes(kind, work, *files) for kind in KINDS}
    order = {kind: i for i, kind in enumerate(KINDS)}
    with ThreadPoolExecutor(args.together) as pool:
        jobs = [
            pool.submit(run, kind, replace(work, seed=seed), *files)
            for kind, seed in missing(document["runs"], args.seeds)
        ]
        for job in as_completed(jobs):
            found = job.result()
            document["runs"].append(found)
            document["runs"].sort(key=lambda each: (order[each["kind"]], each["seed"]))
            args.out.write_text(json.dumps(document) + "\n")
            loss = found["validation"][-1][1]
            print(f"{found['kind']}, seed {found['seed']}: validation loss {loss:.4f}", flush=True)


def main() -> None:
    parser = convergence.curves_parser(str(__doc__))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument(
        "--steps", type=int, default=convergence.WORK.steps, help="fewer only to try it out"
    )
    parser.add_argument("--together", type=int, default=2, help="runs side by side, a core each")
    parser.add_argument("--picture", type=Path, help="SVG")
    args = parser.parse_args()
    work = convergence.shortened(args.steps)
    document = {
        "started": datetime.now().isoformat(timespec="seconds"),
        "machine": training.machine(),
        "steps": args.steps,
        "step_tokens": work.step_tokens,
        "runs": [],
    }
    if args.out.exists():
        document = json.loads(args.out.read_text())
        if document["steps"] != args.steps:
            raise SystemExit(f"{args.out} holds runs of other steps: give another --out")
    if missing(document["runs"], args.seeds):
        measure(document, args, work)
    if args.picture:
        args.picture.write_text(draw(document))


if __name__ == "__main__":
    main()
