"""Runs with random flags in random layouts against one process: what three and more features do
together, which no table of pairs shows.

    python tests/parity/random_rows.py [--cases N] [--seed S] [--out FILE.json]

Most runs compute in float64. Some of them save after their second step and resume in another
layout. Dense runs may compute in bf16 or fp16, and are held against one process in the same
precision and in float64.
Case `S` is a function of S alone. Exit code 1 when a run is off; its command line is printed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from distributed.pool import RankError, Worlds  # noqa: E402
from megatron.tools._study.equal_work import UNIT_ROUNDOFF, narrow_bound  # noqa: E402
from parity import compare  # noqa: E402
from parity.layouts import (  # noqa: E402
    KEY_BIAS,
    KEY_NORM_BIAS,
    PRECISIONS,
    SGD,
    last_number,
    wire_bound,
)
from parity.worker import Outcome, one_thread, run_case  # noqa: E402

from megatron.config.arguments import parse_arguments  # noqa: E402
from megatron.config.errors import UserError  # noqa: E402
from megatron.config.validate import resolve  # noqa: E402
from megatron.parallel.schedule import BUILDERS  # noqa: E402

NARROW = "--train-iters 10"  # the gate holds over 7 or more steps, here those after a save too
# moments matter, and rounding is not amplified: epsilon is above most gradients
ADAM = "--lr 1e-2 --adam-eps 0.1 --adam-beta2 0.95 --weight-decay 0 --clip-grad 0"
VOCABULARY = 50  # the pieces of the NullTokenizer and one more
BASE = """--hidden-size 32 --num-attention-heads 8 --seq-length 16 --train-iters 3 --mock-data
--tokenizer-type NullTokenizer --vocab-size 49 --lr 1e-2 --min-lr 5e-3 --lr-warmup-iters 1
--log-interval 1 --eval-iters 1 --log-params-norm"""
AXES = ("tp", "cp", "pp", "dp", "dp")  # dp twice: ZeRO shards over it
SAVING = "", "--async-save"  # each of half of the runs
FILES = tempfile.gettempdir()  # of --optimizer-nvme-offload, whose files have no names
BALANCING = "aux_loss", "seq_aux_loss", "global_aux_loss"
SAVED = 2  # steps before a run saves and resumes elsewhere
SIZES = {
    "tp": "--tensor-model-parallel-size",
    "cp": "--context-parallel-size",
    "pp": "--pipeline-model-parallel-size",
}
RECOMPUTED = ("core_attn", "qkv", "layernorm", "mlp_act", "mlp", "moe_act", "moe", "mla_up_proj")


@dataclass(frozen=True)
class Layout:
    """What a run has in addition to the flags that its numbers depend on."""

    ranks: int
    flags: tuple[str, ...]

    @property
    def patches(self) -> tuple[str, ...]:
        """Those of worker.py."""
        found = {
            "--cuda-graphs": "recorded",
            "--torch-compile": "traced",
            "--optimizer-nvme-offload": "small_parts",
        }
        return tuple(patch for flag, patch in found.items() if flag in self.flags)


@dataclass(frozen=True)
class Case:
    """A run, and its layout. Of two layouts the run saves in the first and resumes in the other."""

    seed: int
    flags: tuple[str, ...]
    patches: tuple[str, ...]
    layouts: tuple[Layout, ...]

    @property
    def zero(self) -> tuple[str, str] | None:
        """Tensors whose exact gradient is 0, as `layouts.Feature.zero`."""
        words = set(self.flags)
        rotates = {"rope", "yarn"} & words and "--no-rope-freq" not in words  # in every layer
        if rotates or "--attn-logit-softcapping" in words:
            return None
        return KEY_NORM_BIAS if "--qk-layernorm" in words else KEY_BIAS

    @property
    def exact(self) -> tuple[str, ...]:
        """The flags of the same run in float64."""
        narrow = r"--(bf16|fp16|grad-reduce-in-bf16|\S+-dtype bf16)(?= |$)"
        kept = re.sub(narrow, "", " ".join(self.flags)).split()
        return *kept, "--fp64", "--nan-policy", "skip"

    @property
    def precision(self) -> str:
        """In which it computes."""
        return next(name for name in ("bf16", "fp16", "fp64") if f"--{name}" in self.flags)

    @property
    def is_narrow(self) -> bool:
        return self.precision != "fp64"

    def most(self, axis: str) -> int:
        """The largest size of an axis."""
        return max(last_number(layout.flags, SIZES[axis]) for layout in self.layouts)

    @property
    def wire(self) -> float:
        """What narrow reductions add to the relative error."""
        if "--grad-reduce-in-bf16" not in self.flags:
            return 0.0
        batch = last_number(self.flags, "--global-batch-size")
        return wire_bound(self.most("cp") * batch // last_number(self.flags, "--micro-batch-size"))

    @property
    def is_resumed(self) -> bool:
        """Whether it changes its layout on the way."""
        return len(self.layouts) > 1

    @property
    def line(self) -> str:
        """The command lines, to try again."""
        layouts = "; then on ".join(
            f"{layout.ranks} ranks: {' '.join(layout.flags)}" for layout in self.layouts
        )
        patches = f" under {', '.join(self.patches)}" if self.patches else ""
        return f"case {self.seed}: {' '.join(self.flags)}{patches} -- on {layouts}"


class Draw:
    """Draws one case. Flags that need each other are drawn together, others independently; what
    the program refuses is drawn again.
    """

    def __init__(self, seed: int):
        self.seed, self.random, self.refused = seed, random.Random(seed), 0

    def often(self, share: float) -> bool:
        """True in that share of cases."""
        return self.random.random() < share

    def drawn(self, *lines: str) -> list[str]:
        """The words of lines: of `a|b` one; after `?0.2` the rest of the line in a fifth of cases;
        with `*0.2` at its end the line in a fifth of cases.
        """
        found: list[str] = []
        for line in lines:
            words: list[str] = []
            for word in line.split():
                if word[0] in "?*":
                    if self.often(float(word[1:])):
                        continue
                    words = words if word[0] == "?" else []
                    break
                words.append(self.random.choice(word.split("|")) if "|" in word else word)
            found += words
        return found

    def case(self) -> Case:
        """The first draw that the program accepts in its layouts and in one process."""
        while True:
            sizes = self.sizes()
            pipeline = self.pipeline(sizes["pp"])
            flags = self.run(sizes, stages_of(sizes["pp"], pipeline))
            layouts = [self.layout(flags, sizes, pipeline)]
            if self.often(0.3):
                sizes = self.sizes()
                layouts.append(self.layout(flags, sizes, self.pipeline(sizes["pp"])))
            try:
                resolved(flags, 1)
                for layout in layouts:
                    resolved(flags + layout.flags, layout.ranks)
            except UserError:
                self.refused += 1
                continue
            return Case(self.seed, flags, self.patches(flags, layouts), tuple(layouts))

    def sizes(self) -> dict[str, int]:
        """Of the axes, of 2 to 8 ranks."""
        sizes = dict.fromkeys(AXES, 1)
        for _ in range(self.random.choice((1, 2, 2, 3))):
            sizes[self.random.choice(AXES)] *= 2
        return sizes

    def patches(self, flags: tuple[str, ...], layouts: list[Layout]) -> tuple[str, ...]:
        """Of the run: batches with few valid tokens; in fp16 gradients that overflow, unless a
        layer has none or is fixed in a graph.
        """
        found = ["uneven"] if self.often(0.2) else []
        fixed = "--freeze" in flags or any(layout.patches for layout in layouts)
        if "--fp16" in flags and not fixed and self.often(0.6):
            found.append("overflow")
        return tuple(found)

    # ---- the run

    def run(self, sizes: dict[str, int], stages: int) -> tuple[str, ...]:
        """What the numbers depend on, with a batch and layers for such a layout."""
        micro, count = self.random.choice((1, 1, 2)), self.random.choice((1, 2, 3, 4, 8))
        batch = micro * count * sizes["dp"]
        layers = stages * self.random.choice((1, 1, 2)) if stages > 1 else 2
        has_experts, is_latent = self.often(0.4), self.often(0.15)
        # in narrow formats a token may turn to another expert
        is_narrow = not has_experts and self.often(0.3)
        flags = f"{BASE} --micro-batch-size {micro} --global-batch-size {batch}".split()
        flags += ["--num-layers", f"{layers}", *self.model(is_latent)]
        # experts have no biases
        has_biases = not has_experts and self.often(0.5)
        flags += [] if has_biases else ["--disable-bias-linear"]
        flags += self.latent() if is_latent else self.attention(has_biases, is_narrow)
        flags += self.experts() if has_experts else []
        flags += self.schedule(batch, micro * sizes["dp"])
        if is_narrow:
            return *flags, *self.narrow(), *NARROW.split()
        return *flags, *self.optimizer(), "--fp64"

    def narrow(self) -> list[str]:
        """A narrow precision, and an optimizer that does not amplify rounding."""
        found = self.drawn("?0.2 --grad-reduce-in-bf16")
        if self.often(0.35):
            return [*found, *PRECISIONS["fp16"].split()]
        found += self.drawn("--bf16", "?0.35 --main-grads-dtype bf16")
        if self.often(0.6):
            return [*found, *SGD.split()]
        moments = self.drawn("?0.7 --exp-avg-dtype bf16", "?0.7 --exp-avg-sq-dtype bf16")
        return [*found, *ADAM.split(), *moments]

    def model(self, is_latent: bool) -> list[str]:
        """Positions, norms, activations, ends and losses."""
        return [
            *self.drawn("--activation gelu|swiglu|geglu|squared-relu"),
            *self.drawn("--normalization LayerNorm|RMSNorm"),
            *self.positions(is_latent),
            *self.drawn(
                "?0.5 --untie-embeddings-and-output-weights",
                "--make-vocab-size-divisible-by 1|64",
                "?0.15 --final-logit-softcapping 2",
                "?0.2 --z-loss-coeff 1e-2",
                "?0.2 --window-size 6 ?0.5 --window-attn-skip-freq 2",
                "?0.3 --reset-position-ids --reset-attention-mask --eod-mask-loss",
                "--hidden-dropout 0|0.1",
                "--attention-dropout 0|0.1",
            ),
        ]

    def positions(self, is_latent: bool) -> list[str]:
        """Learned, rotary or none."""
        kinds = ("rope", "rope", "yarn", *(() if is_latent else ("learned_absolute", "none")))
        kind = self.random.choice(kinds)
        found = ["--position-embedding-type", kind]
        if kind not in ("rope", "yarn"):
            return found
        found += self.drawn("--rotary-base 100|10000", "?0.15 --no-rope-freq 2")
        scaled = "--rope-scaling-factor 4 --rope-original-max-position-embeddings 8"
        if kind == "yarn":
            return [*found, *scaled.split()]
        if not is_latent:
            found += self.drawn("?0.2 --rotary-percent 0.5")
        llama = self.drawn(f"?0.2 --use-rope-scaling {scaled}")
        return found + (llama or self.drawn("?0.2 --rotary-seq-len-interpolation-factor 2"))

    def attention(self, has_biases: bool, is_narrow: bool) -> list[str]:
        """Heads, their norms and their scores. The norm of two channels is a sign: rounding decides
        its gradient.
        """
        return self.drawn(
            "?0.25 --qk-layernorm",
            f"--kv-channels {'6' if is_narrow else '2|6'} *0.2",
            "" if has_biases else "?0.3 --add-qkv-bias",
            "?0.15 --attn-logit-softcapping 3",
            "?0.4 --group-query-attention --num-query-groups 1|2|4",
        )

    def latent(self) -> list[str]:
        """Latent attention."""
        return self.drawn(
            "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 8",
            "--qk-pos-emb-head-dim 4 --v-head-dim 6|12",
            "?0.5 --q-lora-rank 24",
            "?0.5 --qk-layernorm",
        )

    def experts(self) -> list[str]:
        """Experts, their router and its losses."""
        found = self.drawn(
            "--num-experts 4|8 --moe-ffn-hidden-size 24",
            "--moe-router-score-function softmax|sigmoid|sqrtsoftplus",
        )
        bias = "--moe-router-enable-expert-bias --moe-router-bias-update-rate 2e-2"
        is_softmax = found[-1] == "softmax"
        found += self.drawn("?0.5 --moe-router-pre-softmax" if is_softmax else f"?0.5 {bias}")
        kinds = self.random.sample(BALANCING, self.random.choice((0, 1, 1, 2, 3)))
        found += ["--moe-router-load-balancing-type", *(kinds or ["none"])]
        if kinds:
            found += ["--moe-aux-loss-coeff", *("3e-2", "1e-2", "2e-2")[: len(kinds)]]
        return found + self.drawn(
            "?0.3 --moe-z-loss-coeff 1e-2",
            "--moe-router-topk 1|3 *0.4",
            "?0.2 --moe-router-topk-scaling-factor 2.5",
            "?0.2 --moe-router-num-groups 4 --moe-router-group-topk 2",
            "?0.2 --moe-layer-freq 2",
            "?0.15 --moe-input-jitter-eps 0.1",
            "?0.2 --moe-expert-capacity-factor 0.8 --moe-token-drop-policy probs|position",
            "?0.3 --moe-shared-expert-intermediate-size 16 ?0.5 --moe-shared-expert-gate",
        )

    def schedule(self, batch: int, least: int) -> list[str]:
        """What changes with the steps; a ramp-up from half the batch after two steps of it."""
        found = self.drawn(
            "--lr-decay-style constant|linear|cosine|inverse-square-root",
            "?0.2 --decoupled-lr 3e-2",
            "--freeze embedding|layers.0 *0.1",
        )
        half = batch // 2
        ramp = self.drawn(f"?0.15 --rampup-batch-size {half} {half} {batch}")
        return found + (ramp if half % least == 0 else [])

    def optimizer(self) -> list[str]:
        """The optimizer."""
        found = self.drawn("?0.2 --optimizer sgd") or ["--adam-beta2", "0.95"]
        found += self.drawn("--clip-grad 0|0.1|1.0")
        ramp = "--start-weight-decay 0.1 --end-weight-decay 0.3 --weight-decay-incr-style linear"
        return found + (self.drawn(f"?0.2 {ramp}") or self.drawn("--weight-decay 0|0.1"))

    # ---- the layout, which changes no number

    def layout(self, flags: tuple[str, ...], sizes: dict[str, int], pipeline: list[str]) -> Layout:
        """Of a run with such flags."""
        has_experts = "--num-experts" in flags
        found = [word for axis in SIZES for word in (SIZES[axis], f"{sizes[axis]}")]
        found += pipeline + self.sharding(sizes)
        if has_experts:
            found += self.ranks_of_experts(sizes["tp"] * sizes["cp"] * sizes["dp"])
        found += self.memory(has_experts, "--multi-latent-attention" in flags)
        return Layout(sizes["tp"] * sizes["cp"] * sizes["pp"] * sizes["dp"], tuple(found))

    def pipeline(self, ranks: int) -> list[str]:
        """The schedule of that number of pipeline ranks."""
        if ranks == 1:
            return []
        found = self.drawn(f"--pipeline-schedule {'|'.join(sorted(BUILDERS))}")
        if "interleaved" in found:
            found += ["--num-virtual-stages-per-pipeline-rank", "2"]
        uneven = "--pipeline-model-parallel-layout auto", "--decoder-first-pipeline-num-layers 1"
        return found + self.drawn(f"{self.random.choice(uneven)} *0.4")

    def sharding(self, sizes: dict[str, int]) -> list[str]:
        """Of sequences, optimizer, gradients and weights."""
        found = []
        if sizes["tp"] > 1:
            found += self.drawn("?0.6 --sequence-parallel")
        if sizes["cp"] > 1:
            found += self.drawn("--cp-comm-type allgather|a2a|p2p|a2a+p2p")
            if found[-1] == "a2a+p2p":
                found += ["--hierarchical-context-parallel-sizes", "2", f"{sizes['cp'] // 2}"]
        found += self.drawn("?0.15 --use-tp-pp-dp-mapping")
        sharers = sizes["dp"] * sizes["cp"]
        found += self.drawn(f"--zero-stage {'0|1|2|3|3' if sharers > 1 else '0'}")
        stage = int(found[-1])
        if stage and sharers > 2:
            found += self.drawn("?0.3 --zero-shard-size 2")
        if stage == 3:
            found += self.drawn("?0.3 --zero3-keep-gathered")
        if sharers > 1:
            found += self.drawn("?0.15 --no-overlap-grad-reduce")
        away = self.drawn("?0.2 --optimizer-cpu-offload ?0.4 --optimizer-offload-fraction 0.5")
        if away:
            away += self.drawn(f"?0.4 --optimizer-nvme-offload {FILES}")
        if away and stage == 3:
            away += self.drawn("?0.5 --param-cpu-offload")
        return found + away

    def ranks_of_experts(self, ranks: int) -> list[str]:
        """Where experts lie on the ranks of a stage, and how tokens come to them."""
        size = self.random.choice([size for size in (1, 2, 2, 4) if ranks % size == 0])
        found = ["--expert-model-parallel-size", f"{size}"]
        found += self.drawn("?0.4 --expert-tensor-parallel-size 1|2")
        if size == 1:
            return found
        return found + self.drawn("?0.4 --overlap-moe-expert-parallel-comm")

    def memory(self, has_experts: bool, is_latent: bool) -> list[str]:
        """What is computed again, in pieces or elsewhere; or graphs, which combine with none."""
        if not has_experts and self.often(0.15):
            return ["--cuda-graphs"]
        found = [] if has_experts else self.drawn("?0.2 --torch-compile")
        kind = self.random.choice(("", "", "full", "selective"))
        if kind:
            found += ["--recompute-granularity", kind]
        if kind == "full":
            found += self.drawn(
                "?0.2 --distribute-saved-activations",
                "?0.3 --recompute-method uniform|block --recompute-num-layers 1|2",
            )
        elif kind == "selective":
            fitting = [
                name
                for name in RECOMPUTED
                if (has_experts or not name.startswith("moe"))
                and (is_latent or not name.startswith("mla"))
            ]
            modules = self.random.sample(fitting, self.random.choice((1, 2, 3)))
            found += ["--recompute-modules", *modules]
        away = "--activation-offload --min-offloaded-tensor-size 64"
        return found + self.drawn(
            f"?0.15 {away} ?0.5 --activation-offload-fraction 0.5",
            "?0.2 --fused-linear-cross-entropy",
            "" if has_experts else "?0.15 --tiled-mlp 2",
        )


def stages_of(ranks: int, pipeline: list[str]) -> int:
    """Stages of that number of pipeline ranks with a schedule."""
    return ranks * (2 if {"interleaved", "zero-bubble-v"} & set(pipeline) else 1)


def resolved(flags: tuple[str, ...], ranks: int) -> None:
    """Raises UserError for what the program refuses."""
    resolve(parse_arguments(list(flags)).config, ranks, VOCABULARY)


def faults(case: Case, worlds: Worlds) -> list[str]:
    """What is not the same as in one process."""
    try:
        with one_thread():
            one = run_case(case.flags, case.patches)
            exact = run_case(case.exact, case.patches) if case.is_narrow else one
    except Exception as error:
        return [f"in one process: {type(error).__name__}: {error}"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_in(case, worlds, folder)
    except RankError as error:
        return [str(error)]
    before = SAVED if case.is_resumed else 0
    if case.is_narrow:
        layers = last_number(case.flags, "--num-layers")
        bound, floor = narrow_bound(case.precision, layers), 0.1 * UNIT_ROUNDOFF[case.precision]
        # tensor-parallel ranks add up outputs that each has rounded
        factor = compare.ROUNDED_FACTOR * math.sqrt(case.most("tp"))
        gate = {"floor": floor, "bound": bound, "wire": case.wire, "factor": factor}
        return compare.narrow(exact, one, ranks, before=before, **gate)
    return compare.fp64(one, ranks, zero=case.zero, before=before)


def run_in(case: Case, worlds: Worlds, folder: str) -> list[Outcome]:
    """The outcome on each rank of the last layout."""
    *first, last = case.layouts
    for layout in first:
        saving = SAVING[case.seed % len(SAVING)].split()
        flags = *case.flags, *layout.flags, *saving, "--save", folder
        flags = *flags, "--exit-interval", f"{SAVED}"
        worlds(layout.ranks).run(run_case, flags, case.patches + layout.patches)
    load = ("--load", folder) if first else ()
    flags = *case.flags, *last.flags, *load
    return worlds(last.ranks).run(run_case, flags, case.patches + last.patches)


def resized(flags: tuple[str, ...], sizes: Mapping[str, int]) -> list[str]:
    """The same flags with other values of some."""
    found = list(flags)
    for at, flag in enumerate(flags):
        if flag in sizes:
            found[at + 1] = f"{sizes[flag]}"
    return found


def which_cases(description: str | None) -> argparse.Namespace:
    """What the command line asks for: `cases`, the first one's `seed`, and `out`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="that of the first case")
    parser.add_argument("--out", help="write the results to this JSON file")
    return parser.parse_args()


def main() -> int:
    arguments = which_cases(__doc__)
    worlds, begun, off = Worlds(), time.monotonic(), {}
    refused = resumed = 0
    precisions = dict.fromkeys(("bf16", "fp16", "fp64"), 0)
    for number in range(arguments.cases):
        draw = Draw(arguments.seed + number)
        case = draw.case()
        refused += draw.refused
        resumed += case.is_resumed
        precisions[case.precision] += 1
        found = faults(case, worlds)
        if found:
            off[case.seed] = {"case": case.line, "faults": found}
            print(f"{case.line}\n  {'; '.join(found[:3])}", flush=True)
    worlds.close()
    minutes = round((time.monotonic() - begun) / 60, 1)
    print(f"{arguments.cases - len(off)} of {arguments.cases} equal in {minutes} minutes")
    if arguments.out:
        report = {
            "date": f"{date.today()}",
            "seed": arguments.seed,
            "cases": arguments.cases,
            "resumed in another layout": resumed,
            **{f"in {precision}": count for precision, count in precisions.items()},
            "refused draws": refused,
            "minutes": minutes,
            "off": off,
        }
        Path(arguments.out).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
