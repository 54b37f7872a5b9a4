"""Runs with random flags in random layouts against one process: what three and more features do
together, which no table of pairs shows.

    python tests/parity/random_rows.py [--cases N] [--seed S] [--out FILE.json]

Most runs compute in float64. Some of them save after their second step and resume in another
layout. Dense runs may compute in bf16, and are held against one process in bf16 and in float64.
Case `S` is a function of S alone. Exit code 1 when a run is off; its command line is printed.
"""

from __future__ import annotations

import argparse
import json
import random
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
from parity.layouts import KEY_BIAS, KEY_NORM_BIAS, PRECISIONS  # noqa: E402
from parity.worker import Outcome, one_thread, run_case  # noqa: E402

from megatron.config.arguments import parse_arguments  # noqa: E402
from megatron.config.errors import UserError  # noqa: E402
from megatron.config.validate import resolve  # noqa: E402
from megatron.parallel.schedule import BUILDERS  # noqa: E402

NARROW = "--train-iters 8"  # the gate of bf16 holds over 7 or more steps
VOCABULARY = 50  # the pieces of the NullTokenizer and one more
BASE = """--hidden-size 32 --num-attention-heads 8 --seq-length 16 --train-iters 3 --mock-data
--tokenizer-type NullTokenizer --vocab-size 49 --lr 1e-2 --min-lr 5e-3 --lr-warmup-iters 1
--log-interval 1 --eval-iters 1 --log-params-norm"""
AXES = ("tp", "cp", "pp", "dp", "dp")  # dp twice: ZeRO shards over it
SAVING = "", "--async-save", "--ckpt-parallel-write owner"  # each of a third of the runs
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
        found = {"--cuda-graphs": "recorded", "--torch-compile": "traced"}
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
        if {"rope", "yarn", "--attn-logit-softcapping"} & set(self.flags):
            return None
        return KEY_NORM_BIAS if "--qk-layernorm" in self.flags else KEY_BIAS

    @property
    def exact(self) -> tuple[str, ...]:
        """The flags of the same run in float64."""
        return tuple("--fp64" if flag == "--bf16" else flag for flag in self.flags)

    @property
    def is_narrow(self) -> bool:
        """Whether it computes in bf16."""
        return "--bf16" in self.flags

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

    def case(self) -> Case:
        """The first draw that the program accepts in its layouts and in one process."""
        while True:
            sizes = self.sizes()
            pipeline = self.pipeline(sizes["pp"])
            flags = self.run(sizes, stages_of(sizes["pp"], pipeline))
            layouts = [self.layout(flags, sizes, pipeline)]
            if self.often(0.3) and "--bf16" not in flags:
                sizes = self.sizes()
                layouts.append(self.layout(flags, sizes, self.pipeline(sizes["pp"])))
            try:
                resolved(flags, 1)
                for layout in layouts:
                    resolved(flags + layout.flags, layout.ranks)
            except UserError:
                self.refused += 1
                continue
            patches = ("uneven",) if self.often(0.2) else ()
            return Case(self.seed, flags, patches, tuple(layouts))

    def sizes(self) -> dict[str, int]:
        """Of the axes, of 2 to 8 ranks."""
        sizes = dict.fromkeys(AXES, 1)
        for _ in range(self.random.choice((1, 2, 2, 3))):
            sizes[self.random.choice(AXES)] *= 2
        return sizes

    def run(self, sizes: dict[str, int], stages: int) -> tuple[str, ...]:
        """What the numbers depend on, with a batch and layers for such a layout."""
        micro, count = self.random.choice((1, 1, 2)), self.random.choice((1, 2, 3, 4, 8))
        batch = micro * count * sizes["dp"]
        layers = stages * self.random.choice((1, 1, 2)) if stages > 1 else 2
        has_experts, is_latent = self.often(0.4), self.often(0.15)
        # in narrow formats a token may turn to another expert
        is_narrow = not has_experts and self.often(0.3)
        flags = [*BASE.split(), "--micro-batch-size", f"{micro}", "--global-batch-size", f"{batch}"]
        flags += ["--num-layers", f"{layers}", *self.model(is_latent)]
        # experts have no biases
        has_biases = not has_experts and self.often(0.5)
        flags += [] if has_biases else ["--disable-bias-linear"]
        flags += self.latent() if is_latent else self.attention(has_biases)
        flags += self.experts() if has_experts else []
        flags += self.schedule(batch, micro * sizes["dp"])
        if is_narrow:
            return *flags, *PRECISIONS["bf16"].split(), *NARROW.split()
        return *flags, *self.optimizer(), "--fp64"

    def layout(self, flags: tuple[str, ...], sizes: dict[str, int], pipeline: list[str]) -> Layout:
        """Of a run with such flags."""
        has_experts = "--num-experts" in flags
        found = [word for axis in SIZES for word in (SIZES[axis], f"{sizes[axis]}")]
        found += pipeline + self.sharding(sizes)
        if has_experts:
            found += self.ranks_of_experts(sizes["tp"] * sizes["cp"] * sizes["dp"])
        found += self.memory(has_experts, "--multi-latent-attention" in flags)
        return Layout(sizes["tp"] * sizes["cp"] * sizes["pp"] * sizes["dp"], tuple(found))

    # ---- the run

    def model(self, is_latent: bool) -> list[str]:
        """Positions, norms, activations, ends and losses."""
        found = ["--activation", self.random.choice(("gelu", "swiglu", "geglu", "squared-relu"))]
        found += ["--normalization", self.random.choice(("LayerNorm", "RMSNorm"))]
        found += self.positions(is_latent)
        found += ["--untie-embeddings-and-output-weights"] if self.often(0.5) else []
        found += ["--make-vocab-size-divisible-by", self.random.choice(("1", "64"))]
        found += ["--final-logit-softcapping", "2"] if self.often(0.15) else []
        found += ["--z-loss-coeff", "1e-2"] if self.often(0.2) else []
        if self.often(0.2):
            found += ["--window-size", "6"]
            found += ["--window-attn-skip-freq", "2"] if self.often(0.5) else []
        if self.often(0.3):
            found += ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"]
        for kind in ("hidden", "attention"):
            found += [f"--{kind}-dropout", self.random.choice(("0", "0.1"))]
        return found

    def positions(self, is_latent: bool) -> list[str]:
        """Learned, rotary or none."""
        kinds = ("rope", "rope", "yarn", *(() if is_latent else ("learned_absolute", "none")))
        kind = self.random.choice(kinds)
        found = ["--position-embedding-type", kind]
        if kind not in ("rope", "yarn"):
            return found
        found += ["--rotary-base", self.random.choice(("100", "10000"))]
        found += ["--no-rope-freq", "2"] if self.often(0.15) else []
        scaled = "--rope-scaling-factor", "4", "--rope-original-max-position-embeddings", "8"
        if kind == "yarn":
            return [*found, *scaled]
        found += ["--rotary-percent", "0.5"] * (not is_latent and self.often(0.2))
        if self.often(0.2):
            return [*found, "--use-rope-scaling", *scaled]
        return found + ["--rotary-seq-len-interpolation-factor", "2"] * self.often(0.2)

    def attention(self, has_biases: bool) -> list[str]:
        """Heads, their norms and their scores."""
        found = ["--qk-layernorm"] if self.often(0.25) else []
        found += ["--kv-channels", self.random.choice(("2", "6"))] * self.often(0.2)
        found += ["--add-qkv-bias"] * (not has_biases and self.often(0.3))
        found += ["--attn-logit-softcapping", "3"] if self.often(0.15) else []
        if self.often(0.4):
            groups = self.random.choice(("1", "2", "4"))
            found += ["--group-query-attention", "--num-query-groups", groups]
        return found

    def latent(self) -> list[str]:
        """Latent attention."""
        found = ["--multi-latent-attention", "--kv-lora-rank", "12", "--qk-head-dim", "8"]
        found += ["--qk-pos-emb-head-dim", "4", "--v-head-dim", self.random.choice(("6", "12"))]
        found += ["--q-lora-rank", "24"] if self.often(0.5) else []
        return found + (["--qk-layernorm"] if self.often(0.5) else [])

    def experts(self) -> list[str]:
        """Experts, their router and its losses."""
        choose = self.random.choice
        found = ["--num-experts", choose(("4", "8")), "--moe-ffn-hidden-size", "24"]
        score = choose(("softmax", "sigmoid", "sqrtsoftplus"))
        found += ["--moe-router-score-function", score]
        if score == "softmax" and self.often(0.5):
            found += ["--moe-router-pre-softmax"]
        if score != "softmax" and self.often(0.5):
            found += ["--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", "2e-2"]
        balance = choose(("none", "aux_loss", "seq_aux_loss", "global_aux_loss"))
        found += ["--moe-router-load-balancing-type", balance]
        found += ["--moe-aux-loss-coeff", "3e-2"] if balance != "none" else []
        found += ["--moe-z-loss-coeff", "1e-2"] if self.often(0.3) else []
        found += ["--moe-router-topk", choose(("1", "3"))] * self.often(0.4)
        found += ["--moe-router-topk-scaling-factor", "2.5"] * self.often(0.2)
        if self.often(0.2):
            found += ["--moe-router-num-groups", "4", "--moe-router-group-topk", "2"]
        found += ["--moe-layer-freq", "2"] if self.often(0.2) else []
        found += ["--moe-input-jitter-eps", "0.1"] if self.often(0.15) else []
        if self.often(0.2):
            found += ["--moe-expert-capacity-factor", "0.8"]
            found += ["--moe-token-drop-policy", choose(("probs", "position"))]
        if self.often(0.3):
            found += ["--moe-shared-expert-intermediate-size", "16"]
            found += ["--moe-shared-expert-gate"] if self.often(0.5) else []
        return found

    def schedule(self, batch: int, least: int) -> list[str]:
        """What changes with the steps; a ramp-up from half the batch after two steps of it."""
        styles = "constant", "linear", "cosine", "inverse-square-root"
        found = ["--lr-decay-style", self.random.choice(styles)]
        found += ["--decoupled-lr", "3e-2"] if self.often(0.2) else []
        found += ["--freeze", self.random.choice(("embedding", "layers.0"))] * self.often(0.1)
        if self.often(0.15) and batch // 2 % least == 0:
            half = f"{batch // 2}"
            found += ["--rampup-batch-size", half, half, f"{batch}"]
        return found

    def optimizer(self) -> list[str]:
        """The optimizer."""
        found = ["--optimizer", "sgd"] if self.often(0.2) else ["--adam-beta2", "0.95"]
        found += ["--clip-grad", self.random.choice(("0", "0.1", "1.0"))]
        if self.often(0.2):
            found += ["--start-weight-decay", "0.1", "--end-weight-decay", "0.3"]
            return [*found, "--weight-decay-incr-style", "linear"]
        return [*found, "--weight-decay", self.random.choice(("0", "0.1"))]

    # ---- the layout, which changes no number

    def pipeline(self, ranks: int) -> list[str]:
        """The schedule of that number of pipeline ranks."""
        if ranks == 1:
            return []
        schedule = self.random.choice(sorted(BUILDERS))
        found = ["--pipeline-schedule", schedule]
        if schedule == "interleaved":
            found += ["--num-virtual-stages-per-pipeline-rank", "2"]
        uneven = "--pipeline-model-parallel-layout auto", "--decoder-first-pipeline-num-layers 1"
        return found + self.random.choice(uneven).split() * self.often(0.4)

    def sharding(self, sizes: dict[str, int]) -> list[str]:
        """Of sequences, optimizer, gradients and weights."""
        found = ["--sequence-parallel"] if sizes["tp"] > 1 and self.often(0.6) else []
        found += ["--no-tp-comm-overlap"] if sizes["tp"] > 1 and self.often(0.2) else []
        if sizes["cp"] > 1:
            kind = self.random.choice(("allgather", "a2a", "p2p", "a2a+p2p"))
            found += ["--cp-comm-type", kind]
            if kind == "a2a+p2p":
                levels = f"{sizes['cp'] // 2}"
                found += ["--hierarchical-context-parallel-sizes", "2", levels]
        found += ["--use-tp-pp-dp-mapping"] if self.often(0.15) else []
        sharers = sizes["dp"] * sizes["cp"]
        stage = self.random.choice((0, 1, 2, 3, 3)) if sharers > 1 else 0
        found += ["--zero-stage", f"{stage}"]
        if stage and sharers > 2 and self.often(0.3):
            found += ["--zero-shard-size", "2"]
        found += ["--zero3-keep-gathered"] if stage == 3 and self.often(0.3) else []
        found += ["--no-overlap-grad-reduce"] if sharers > 1 and self.often(0.15) else []
        if self.often(0.15):
            found += ["--optimizer-cpu-offload"]
            found += ["--optimizer-offload-fraction", "0.5"] if self.often(0.4) else []
            found += ["--param-cpu-offload"] if stage == 3 and self.often(0.5) else []
        return found

    def ranks_of_experts(self, ranks: int) -> list[str]:
        """Where experts lie on the ranks of a stage, and how tokens come to them."""
        size = self.random.choice([size for size in (1, 2, 2, 4) if ranks % size == 0])
        found = ["--expert-model-parallel-size", f"{size}"]
        if self.often(0.4):
            found += ["--expert-tensor-parallel-size", self.random.choice(("1", "2"))]
        if size > 1 and self.often(0.2):
            found += ["--moe-token-dispatcher-type", "allgather"]
        elif size > 1 and self.often(0.4):
            found += ["--overlap-moe-expert-parallel-comm"]
        return found

    def memory(self, has_experts: bool, is_latent: bool) -> list[str]:
        """What is computed again, in pieces or elsewhere; or graphs, which combine with none."""
        if not has_experts and self.often(0.15):
            return ["--cuda-graphs"]
        found = ["--torch-compile"] * (not has_experts and self.often(0.2))
        kind = self.random.choice(("", "", "full", "selective"))
        fitting = [
            name
            for name in RECOMPUTED
            if (has_experts or not name.startswith("moe")) and (is_latent or name[:3] != "mla")
        ]
        if kind == "full":
            found += ["--recompute-granularity", "full"]
            found += ["--distribute-saved-activations"] * self.often(0.2)
            if self.often(0.3):
                found += ["--recompute-method", self.random.choice(("uniform", "block"))]
                found += ["--recompute-num-layers", self.random.choice(("1", "2"))]
        elif kind == "selective":
            modules = self.random.sample(fitting, self.random.choice((1, 2, 3)))
            found += ["--recompute-granularity", "selective", "--recompute-modules", *modules]
        if self.often(0.15):
            found += ["--activation-offload", "--min-offloaded-tensor-size", "64"]
            found += ["--activation-offload-fraction", "0.5"] * self.often(0.5)
        found += ["--fused-linear-cross-entropy"] * self.often(0.2)
        if not has_experts:
            found += ["--tiled-mlp", "2"] * self.often(0.15)
        return found


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
    if case.is_narrow:
        layers = int(case.flags[case.flags.index("--num-layers") + 1])
        bound, floor = narrow_bound("bf16", layers), 0.1 * UNIT_ROUNDOFF["bf16"]
        return compare.narrow(exact, one, ranks, floor=floor, bound=bound)
    return compare.fp64(one, ranks, zero=case.zero, before=SAVED if case.is_resumed else 0)


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
    refused = resumed = narrow = 0
    for number in range(arguments.cases):
        draw = Draw(arguments.seed + number)
        case = draw.case()
        refused += draw.refused
        resumed += case.is_resumed
        narrow += case.is_narrow
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
            "in bf16": narrow,
            "refused draws": refused,
            "minutes": minutes,
            "off": off,
        }
        Path(arguments.out).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
