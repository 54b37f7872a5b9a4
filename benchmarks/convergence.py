"""The quickstart's model trained to its end by this project, by litgpt and by nanoGPT, several
seeds each: is the loss equal at equal tokens, and what does a token cost?

    bash scripts/quickstart.sh                       # once: the token file
    python benchmarks/training.py --setup DIR        # once: litgpt's environment
    python benchmarks/convergence.py --peers DIR --nanogpt CHECKOUT \\
        --out docs/results/convergence.json

Every run trains on the same tokens (scripts/quickstart.sh) with the same batch, AdamW, schedule and
rule of initial weights, in fp32 on one thread, without dropout; each trainer draws weights and
order from the seed in its own way. litgpt cannot express learned positions nor nanoGPT rotary ones,
so that each is compared in its own shape: litgpt with the quickstart's Llama shape,
nanoGPT with GPT-2's (learned positions, LayerNorm, GELU, biases) of the same width and depth.
CHECKOUT is a clone of nanoGPT at the commit below; its train.py runs unchanged. It draws any window
again and again, so it runs twice: as it comes, and with windows drawn without replacement, as the
others do (the shims are in benchmarks/peers/).

First each peer trains 20 steps from our initial weights on our samples, and must end with our loss
but for rounding: the model, the optimizer and the schedule are then the same. Final weights are
evaluated on the same 224 windows of held-out text: ours by pretrain_gpt.py, the
peers by their own model and one common function. The criterion, fixed before the first run: two
trainers are equal when the 95% interval of the difference of their means (Welch's t) holds zero and
lies within 0.02. A peer that draws windows with replacement sees
fewer different tokens and is not held to it. Seeds take turns; CPU seconds of one thread are the
main figure of speed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a file: this folder's `kernels` and `data` must hide no package
    sys.path[0] = str(ROOT)

import numpy as np
import torch
from megatron.benchmarks import training
from megatron.benchmarks.peers.common import TrainedWork
from megatron.tools._report.metrics_file import read_metrics

from megatron.config.arguments import parse_arguments
from megatron.config.validate import resolve
from megatron.data.loader import FileReader, build_data
from megatron.data.tokenizer import build_tokenizer
from megatron.model.build import declared
from megatron.model.init import fill_initial
from megatron.model.spec import whole

NANOGPT = "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"
WORK = TrainedWork()
SEEDS = 5
EVALUATED = 28  # batches, as in the quickstart
TOLERANCE = 0.02  # of a difference of losses that counts as none
# from our start: roundings of fp32, which 20 steps multiply, and the digits of our console
SAME_STEPS, SAME_WITHIN = 20, 1e-5
RATE = re.compile(r"iteration +(\d+)/.*\| learning rate: (\S+)")
VALIDATION = re.compile(r"validation loss at iteration (\d+) \| lm loss value: (\S+)")


@dataclass(frozen=True)
class Side:
    """A trainer in one shape; `script` is None for ours, whose `like` is its own name."""

    shape: str
    like: str  # the side of ours that it is compared with
    script: str | None = None
    environment: str | None = None
    each_once: int = 0
    held: bool = True  # to the criterion


SIDES = {
    "ours, Llama shape": Side("Llama", "ours, Llama shape"),
    "litgpt": Side("Llama", "ours, Llama shape", "litgpt_trained.py", "litgpt"),
    "ours, GPT-2 shape": Side("GPT-2", "ours, GPT-2 shape"),
    "nanoGPT": Side("GPT-2", "ours, GPT-2 shape", "nanogpt_trained.py", held=False),
    "nanoGPT, each window once": Side(
        "GPT-2", "ours, GPT-2 shape", "nanogpt_trained.py", each_once=1
    ),
}


def shortened(steps: int) -> TrainedWork:
    """The work in fewer steps, a tenth of them warm-up, as in the whole one."""
    return replace(WORK, steps=steps, lr_warmup=steps // 10)


def our_flags(work: TrainedWork, shape: str, data: Path, tokenizer: Path) -> list[str]:
    """`pretrain_gpt.py`'s flags for a run."""
    flags = f"""--num-layers {work.layers} --hidden-size {work.hidden}
        --num-attention-heads {work.heads} --seq-length {work.seq} {training.SHAPES[shape]}
        --init-method-std {work.initial_std} --hidden-dropout 0 --attention-dropout 0
        --micro-batch-size {work.micro_batch} --global-batch-size {work.step_samples}
        --train-iters {work.steps} --lr {work.lr} --min-lr {work.min_lr} --lr-decay-style cosine
        --lr-warmup-iters {work.lr_warmup} --weight-decay {work.weight_decay} --clip-grad 1
        --adam-beta1 0.9 --adam-beta2 0.95 --seed {work.seed} --split 92,4,4
        --eval-interval {work.steps} --eval-iters {EVALUATED} --log-interval {work.warmup}
        --tokenizer-type SentencePieceTokenizer"""
    return [*flags.split(), "--data-path", str(data), "--tokenizer-model", str(tokenizer)]


def write_tokens(folder: Path, flags: list[str]) -> dict[str, int]:
    """The run's tokens for the peers, in new files of `folder`: `train` [n] as uint16 and
    `validation` [windows, seq + 1] in the order of our evaluation, in the files that common.py
    reads, and once more as train.bin and val.bin, which nanoGPT reads. Returns their sizes.
    """
    config = parse_arguments(flags).config
    data = build_data(config, build_tokenizer(config.data))
    assert data.train is not None and isinstance(data.train.reader, FileReader)
    [stream] = data.train.reader.streams
    [held_out] = data.valid.values()
    batch = held_out.batch(0, EVALUATED * config.training.global_batch_size)
    tokens = stream.dataset.tokens[stream.begin : stream.begin + stream.num_tokens]
    arrays = {
        "train": np.asarray(tokens, np.uint16),
        "validation": np.concatenate([batch.tokens, batch.labels[:, -1:]], 1),
    }
    arrays["train"].tofile(folder / "train.bin")
    arrays["validation"].astype(np.uint16).tofile(folder / "val.bin")
    index = {name: [str(array.dtype), array.shape] for name, array in arrays.items()}
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "tensors.bin").write_bytes(b"".join(array.tobytes() for array in arrays.values()))
    return {name: array.size for name, array in arrays.items()}


def write_start(folder: Path, work: TrainedWork, flags: list[str]) -> None:
    """What write_tokens() writes, and the run's own beginning: its initial matrices by their
    logical names and `places`, at which its samples begin in `train`. A peer needs a few more
    samples than it trains on.
    """
    write_tokens(folder, flags)
    config = resolve(parse_arguments(flags).config, 1, work.vocab).config
    data = build_data(config, build_tokenizer(config.data))
    [stream] = data.train.reader.streams
    arrays = {"places": stream.places(np.arange((work.steps + 1) * work.step_samples))}
    parameters = declared(config.model, work.vocab).values()
    for tensor in (tensor for spec in parameters for tensor in spec.tensors):
        if len(tensor.shape) == 2:
            values = torch.empty(tensor.shape)
            fill_initial(whole(tensor), values, config.training.seed)
            arrays[tensor.name] = values.numpy()
    index = json.loads((folder / "index.json").read_text())
    index |= {name: [str(array.dtype), array.shape] for name, array in arrays.items()}
    (folder / "index.json").write_text(json.dumps(index))
    with open(folder / "tensors.bin", "ab") as file:
        file.writelines(array.tobytes() for array in arrays.values())


def check_nanogpt(checkout: Path) -> None:
    """Raises SystemExit unless the folder is an unchanged clone of nanoGPT at the commit that the
    results are of.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    found = git("rev-parse", "HEAD")
    if found != NANOGPT:
        raise SystemExit(
            f"--nanogpt {checkout}: is at commit {found or 'none'}: clone nanoGPT "
            f"(github.com/karpathy/nanoGPT) and check out {NANOGPT}"
        )
    if changes := git("status", "--porcelain", "--untracked-files=no"):
        raise SystemExit(f"--nanogpt {checkout}: has changes, undo them:\n{changes}")


def our_rate_error(lines: list[str], work: TrainedWork) -> float:
    """As StepClock.rate_error, of the rates that our console lines show."""
    found = {int(match[1]): float(match[2]) for line in lines if (match := RATE.search(line))}
    return max(abs(rate - work.learning_rate(step - 1)) for step, rate in found.items()) / work.lr


def our_validation_loss(lines: list[str], work: TrainedWork) -> float:
    """The loss that pretrain_gpt.py prints for the held-out windows after the last step."""
    found = {int(match[1]): float(match[2]) for line in lines if (match := VALIDATION.search(line))}
    return found[work.steps]


def our_curve(command: list[str], work: TrainedWork) -> dict:
    """One of our runs, whose metrics have a line for every step: its losses, its validation loss
    and facts of its process. Raises RuntimeError when it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        whole = [*command, "--save", folder]
        lines, facts = training.watched(whole, 1, OMP_WAIT_POLICY="passive")
        if facts["exit_code"]:
            raise training.failed(whole, lines, facts["exit_code"])
        losses = [row["lm loss"] for row in read_metrics(folder) if "lm loss" in row]
    assert len(losses) == work.steps, f"{len(losses)} of {work.steps} steps were logged: {command}"
    final = our_validation_loss([line for line, _ in lines], work)
    return {"validation_loss": final, "losses": losses, **facts}


def run(who: str, work: TrainedWork, flags: list[str], tokens: Path, places: dict) -> dict:
    """One training run from start to end: its answer. Raises RuntimeError when it fails."""
    side, environ = SIDES[who], {"OMP_WAIT_POLICY": "passive"}
    python, script, arguments = sys.executable, ROOT / "pretrain_gpt.py", flags
    if side.script is not None:
        script, arguments = training.SCRIPTS / side.script, [str(tokens), *work.arguments()]
        environ["PYTHONPATH"] = str(places["nanogpt"])
    if side.environment is not None:
        del environ["PYTHONPATH"]
        python = str(places["peers"] / side.environment / "bin" / "python")
    command = [python, str(script), *arguments]
    lines, facts = training.watched(command, work.threads, **environ)
    answers = training.answers(line for line, _ in lines)
    if facts["exit_code"] or (side.script is not None and not answers):
        raise training.failed(command, lines, facts["exit_code"])
    if side.script is None:
        text = [line for line, _ in lines]
        answer = training.our_answer(lines, work)
        answer["validation_loss"] = our_validation_loss(text, work)
        answer["rate_error"] = our_rate_error(text, work)
    else:
        answer = {key: value for key, value in answers[0].items() if key != "step_seconds"}
    if answer["rate_error"] > 1e-6:  # the digits of a console line
        raise RuntimeError(f"{who}: learning rates differ by {answer['rate_error']:g} of the peak")
    return {"who": who, "seed": work.seed, **answer, **facts}


def t_quantile(freedom: float, probability: float = 0.975) -> float:
    """Student's t for these degrees of freedom, a real number >= 1: the integral of its density
    from 0, by Simpson's rule, inverted by bisection.
    """
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    scale /= math.sqrt(freedom * math.pi)

    def below(t: float) -> float:
        points = np.linspace(0.0, t, 4001)
        density = scale * (1 + points**2 / freedom) ** (-(freedom + 1) / 2)
        weights = np.where(np.arange(4001) % 2, 4.0, 2.0)
        weights[0] = weights[-1] = 1.0
        return 0.5 + float(density @ weights) * t / 12000

    low, high = 0.0, 100.0
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < probability else (low, middle)
    return low


def welch(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Difference of the means, theirs less ours, and half the width of its 95% interval: Welch's t
    for unequal variances, degrees of freedom by Welch and Satterthwaite.
    """
    parts = [statistics.variance(values) / len(values) for values in (ours, theirs)]
    variance = sum(parts)
    if variance == 0:
        return statistics.mean(theirs) - statistics.mean(ours), 0.0
    freedom = variance**2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (ours, theirs))
    )
    half = t_quantile(freedom) * math.sqrt(variance)
    return statistics.mean(theirs) - statistics.mean(ours), half


def summary(runs: list[dict]) -> list[dict]:
    """One row for each side that has run with two seeds or more; a peer's holds the comparison with
    ours, too.
    """
    rows = []
    for who, side in SIDES.items():
        found = {name: [r for r in runs if r["who"] == name] for name in (who, side.like)}
        if min(len(each) for each in found.values()) < 2:
            continue
        losses = {name: [r["validation_loss"] for r in each] for name, each in found.items()}
        row = {
            "who": who,
            "shape": side.shape,
            "seeds": len(found[who]),
            "loss": statistics.mean(losses[who]),
            "spread": statistics.stdev(losses[who]),
            "least": min(losses[who]),
            "most": max(losses[who]),
            "tokens_per_cpu_second": statistics.median(
                r["tokens_per_cpu_second"] for r in found[who]
            ),
            "tokens_per_second": statistics.median(r["tokens_per_second"] for r in found[who]),
        }
        if side.script is not None:
            difference, half = welch(losses[side.like], losses[who])
            low, high = difference - half, difference + half
            row |= {"difference": difference, "low": low, "high": high, "held": side.held}
            row["our_seeds"] = len(found[side.like])
            row["equal"] = low <= 0 <= high and max(-low, high) <= TOLERANCE
        rows.append(row)
    return rows


def same_start(prefix: Path, tokenizer: Path, places: dict) -> dict[str, float]:
    """Of each peer: how far its loss on the held-out windows is from ours after a few steps that
    begin with the same weights and read the same samples. Raises RuntimeError when it is more than
    rounding: then the two do not do the same work.
    """
    work, found = replace(shortened(SAME_STEPS), warmup=SAME_STEPS // 2, same_start=1), {}
    work = replace(work, lr=work.lr / 10, min_lr=work.min_lr / 10)  # high rates multiply rounding
    for who, side in SIDES.items():
        if side.script is None or not side.held:
            continue
        with tempfile.TemporaryDirectory() as folder:
            flags = our_flags(work, side.shape, prefix, tokenizer)
            write_start(Path(folder), work, flags)
            ours, peer = (
                run(name, work, flags, Path(folder), places)["validation_loss"]
                for name in (side.like, who)
            )
        found[who] = abs(ours - peer)
        print(
            f"{who} from our start: {SAME_STEPS} steps end {found[who]:.1e} from ours", flush=True
        )
        if found[who] > SAME_WITHIN:
            raise RuntimeError(f"{who} does other work than ours: {found[who]:g} apart")
    return found


def curves_parser(text: str) -> argparse.ArgumentParser:
    """The command line that all programs have whose runs train on the quickstart's tokens; `text`:
    what --help prints first.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    quickstart = ROOT / "quickstart"
    parser.add_argument("--data", type=Path, default=quickstart / "shakespeare_text_document")
    parser.add_argument("--tokenizer-model", type=Path, default=quickstart / "tokenizer.model")
    parser.add_argument("--out", type=Path, required=True, help="JSON; runs in it are kept")
    return parser


def turns(seeds: int, sides: Collection[str] = tuple(SIDES)) -> list[tuple[str, int]]:
    """Each of these sides and seeds, in the order of the runs: the sides that are held to the
    criterion take turns, a different one first with each seed; then come the others.
    """
    names = [who for who, side in SIDES.items() if side.held and who in sides]
    others = [who for who, side in SIDES.items() if not side.held and who in sides]
    order = []
    for seed in range(1, seeds + 1):
        first = seed % max(1, len(names))
        order += [(who, seed) for who in names[first:] + names[:first]]
    return order + [(who, seed) for seed in range(1, seeds + 1) for who in others]


def measure(args: argparse.Namespace, document: dict) -> None:
    """Run what the document lacks, seed by seed in turning order, and write it after every run."""
    prefix, tokenizer = args.data.resolve(), args.tokenizer_model.resolve()
    places = {"peers": args.peers.resolve(), "nanogpt": args.nanogpt.resolve()}
    if "same_start" not in document:
        document["same_start"] = same_start(prefix, tokenizer, places)
    with tempfile.TemporaryDirectory() as folder:
        base = shortened(args.steps)
        flags = our_flags(base, "Llama", prefix, tokenizer)
        document["tokens"] = write_tokens(Path(folder), flags)
        for who, seed in turns(args.seeds, args.sides):
            if not any(r["who"] == who and r["seed"] == seed for r in document["runs"]):
                work = replace(base, seed=seed, each_once=SIDES[who].each_once)
                flags = our_flags(work, SIDES[who].shape, prefix, tokenizer)
                found = run(who, work, flags, Path(folder), places)
                document["runs"].append(found)
                document["rows"] = summary(document["runs"])
                args.out.write_text(json.dumps(document, indent=1) + "\n")
                print(
                    f"seed {seed}, {who}: loss {found['validation_loss']:.4f}, "
                    f"{found['tokens_per_cpu_second']:.0f} tokens per CPU second",
                    flush=True,
                )


def main() -> None:
    parser = curves_parser(str(__doc__))
    parser.add_argument(
        "--peers", type=Path, required=True, help="what training.py --setup made (litgpt)"
    )
    parser.add_argument("--nanogpt", type=Path, required=True, help="a clone of nanoGPT")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=list(SIDES), help="that run; default: all"
    )
    parser.add_argument("--steps", type=int, default=WORK.steps, help="fewer only to try it out")
    args = parser.parse_args()
    check_nanogpt(args.nanogpt)
    document = {
        "started": datetime.now().isoformat(timespec="seconds"),
        "machine": training.machine(),
        "nanogpt": NANOGPT,
        "work": asdict(shortened(args.steps)),
        "tolerance": TOLERANCE,
        "runs": [],
    }
    if args.out.exists():
        document = json.loads(args.out.read_text())
        if document["work"]["steps"] != args.steps:
            raise SystemExit(f"{args.out} holds runs of other steps: give another --out")
    measure(args, document)
    for row in document["rows"]:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
