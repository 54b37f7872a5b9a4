"""Runs with random flags in random layouts against one process, in float64: what three and more
features do together, which no table of pairs shows.

    python tests/parity/random_rows.py [--cases N] [--seed S] [--out FILE.json]

Case `S` is a function of S alone. Exit code 1 when a run is off; its command line is printed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from distributed.pool import RankError, Worlds  # noqa: E402
from parity import compare  # noqa: E402
from parity.layouts import KEY_BIAS, KEY_NORM_BIAS  # noqa: E402
from parity.worker import one_thread, run_case  # noqa: E402

from megatron.config.arguments import parse_arguments  # noqa: E402
from megatron.config.errors import UserError  # noqa: E402
from megatron.config.validate import resolve  # noqa: E402
from megatron.parallel.schedule import BUILDERS  # noqa: E402

VOCABULARY = 50  # the pieces of the NullTokenizer and one more
BASE = """--hidden-size 32 --num-attention-heads 8 --seq-length 16 --train-iters 3 --mock-data
--tokenizer-type NullTokenizer --vocab-size 49 --lr 1e-2 --lr-warmup-iters 1 --log-interval 1
--eval-iters 1 --log-params-norm --fp64"""
AXES = ("tp", "cp", "pp", "dp", "dp")  # dp twice: ZeRO shards over it
SIZES = {
    "tp": "--tensor-model-parallel-size",
    "cp": "--context-parallel-size",
    "pp": "--pipeline-model-parallel-size",
}
RECOMPUTED = ("core_attn", "qkv", "layernorm", "mlp_act", "mlp", "moe_act", "moe", "mla_up_proj")


@dataclass(frozen=True)
class Case:
    """Flags of the run, and what the run in the layout has beside them."""

    seed: int
    ranks: int
    flags: tuple[str, ...]
    layout: tuple[str, ...]
    patches: tuple[str, ...]
    zero: tuple[str, str] | None  # as `layouts.Feature.zero`

    @property
    def line(self) -> str:
        """Both command lines, to try again."""
        patches = f" under {', '.join(self.patches)}" if self.patches else ""
        return (
            f"case {self.seed}: {' '.join(self.flags)} -- in the layout ({self.ranks} ranks): "
            f"{' '.join(self.layout)}{patches}"
        )


class Draw:
    """Draws one case. Flags that need each other are drawn together, others independently; what
    the program refuses is drawn again.
    """

    def __init__(self, seed: int):
        self.seed, self.random, self.refused = seed, random.Random(seed), 0

    def often(self, share: float) -> bool:
        """True in so many cases."""
        return self.random.random() < share

    def case(self) -> Case:
        """The first draw that the program accepts in the layout and in one process."""
        while True:
            case = self.drawn()
            try:
                resolved(case.flags, 1)
                resolved(case.flags + case.layout, case.ranks)
                return case
            except UserError:
                self.refused += 1

    def drawn(self) -> Case:
        """A case, which may be refused."""
        sizes = {"tp": 1, "cp": 1, "pp": 1, "dp": 1}
        for _ in range(self.random.choice((1, 2, 2, 3))):
            sizes[self.random.choice(AXES)] *= 2
        ranks = sizes["tp"] * sizes["cp"] * sizes["pp"] * sizes["dp"]
        micro, count = self.random.choice((1, 1, 2)), self.random.choice((1, 2, 3, 4, 8))
        batch = micro * count * sizes["dp"]
        has_experts, is_latent = self.often(0.4), self.often(0.15)
        rotates = is_latent or self.often(0.6)
        capped = not is_latent and self.often(0.15)
        flags = [*BASE.split(), "--micro-batch-size", f"{micro}", "--global-batch-size", f"{batch}"]
        flags += self.model(rotates, capped)
        # experts have no biases
        flags += ["--disable-bias-linear"] if has_experts or self.often(0.5) else []
        flags += self.latent() if is_latent else self.attention()
        flags += self.experts() if has_experts else []
        flags += self.training(batch, micro * sizes["dp"])
        stages, pipeline = self.pipeline(sizes["pp"])
        flags += ["--num-layers", f"{stages * self.random.choice((1, 1, 2)) if stages > 1 else 2}"]
        layout = [word for axis in SIZES for word in (SIZES[axis], f"{sizes[axis]}")]
        layout += pipeline + self.sharding(sizes)
        if has_experts:
            layout += self.ranks_of_experts(sizes["tp"] * sizes["cp"] * sizes["dp"])
        layout += self.memory(has_experts, is_latent)
        zero = None
        if not rotates and not capped:
            zero = KEY_NORM_BIAS if "--qk-layernorm" in flags else KEY_BIAS
        patches = ("uneven",) if self.often(0.2) else ()
        patches += ("recorded",) if "--cuda-graphs" in layout else ()
        return Case(self.seed, ranks, tuple(flags), tuple(layout), patches, zero)

    # ---- the run

    def model(self, rotates: bool, capped: bool) -> list[str]:
        """Positions, norms, activations, ends and losses."""
        found = ["--activation", self.random.choice(("gelu", "swiglu", "geglu", "squared-relu"))]
        found += ["--normalization", self.random.choice(("LayerNorm", "RMSNorm"))]
        if rotates:
            found += ["--position-embedding-type", "rope"]
            found += ["--rotary-base", self.random.choice(("100", "10000"))]
        found += ["--untie-embeddings-and-output-weights"] if self.often(0.5) else []
        found += ["--make-vocab-size-divisible-by", self.random.choice(("1", "64"))]
        found += ["--attn-logit-softcapping", "3"] if capped else []
        found += ["--final-logit-softcapping", "2"] if self.often(0.15) else []
        found += ["--z-loss-coeff", "1e-2"] if self.often(0.2) else []
        found += ["--window-size", "6"] if self.often(0.2) else []
        if self.often(0.3):
            found += ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"]
        for kind in ("hidden", "attention"):
            found += [f"--{kind}-dropout", self.random.choice(("0", "0.1"))]
        return found

    def attention(self) -> list[str]:
        """Heads and their norms."""
        found = ["--qk-layernorm"] if self.often(0.25) else []
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
        found += ["--moe-layer-freq", "2"] if self.often(0.2) else []
        found += ["--moe-input-jitter-eps", "0.1"] if self.often(0.15) else []
        found += ["--moe-expert-capacity-factor", "0.8"] if self.often(0.15) else []
        if self.often(0.3):
            found += ["--moe-shared-expert-intermediate-size", "16"]
            found += ["--moe-shared-expert-gate"] if self.often(0.5) else []
        return found

    def training(self, batch: int, least: int) -> list[str]:
        """The optimizer and its schedule; a ramp-up from half the batch after two steps of it."""
        found = ["--optimizer", "sgd"] if self.often(0.2) else ["--adam-beta2", "0.95"]
        found += ["--clip-grad", self.random.choice(("0", "0.1", "1.0"))]
        found += ["--weight-decay", self.random.choice(("0", "0.1"))]
        found += ["--decoupled-lr", "3e-2"] if self.often(0.2) else []
        found += ["--freeze", self.random.choice(("embedding", "layers.0"))] * self.often(0.1)
        if self.often(0.15) and batch // 2 % least == 0:
            half = f"{batch // 2}"
            found += ["--rampup-batch-size", half, half, f"{batch}"]
        return found

    # ---- the layout, which changes no number

    def pipeline(self, ranks: int) -> tuple[int, list[str]]:
        """(stages, flags) of so many pipeline ranks."""
        if ranks == 1:
            return 1, []
        schedule = self.random.choice(sorted(BUILDERS))
        stages = ranks * (2 if schedule in ("interleaved", "zero-bubble-v") else 1)
        found = ["--pipeline-schedule", schedule]
        if schedule == "interleaved":
            found += ["--num-virtual-stages-per-pipeline-rank", "2"]
        return stages, found

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
        found = []
        kind = self.random.choice(("", "", "full", "selective"))
        fitting = [
            name
            for name in RECOMPUTED
            if (has_experts or not name.startswith("moe")) and (is_latent or name[:3] != "mla")
        ]
        if kind == "full":
            found += ["--recompute-granularity", "full"]
        elif kind == "selective":
            modules = self.random.sample(fitting, self.random.choice((1, 2, 3)))
            found += ["--recompute-granularity", "selective", "--recompute-modules", *modules]
        found += ["--activation-offload", "--min-offloaded-tensor-size", "64"] * self.often(0.15)
        found += ["--fused-linear-cross-entropy"] * self.often(0.2)
        if not has_experts:
            found += ["--tiled-mlp", "2"] * self.often(0.15)
        return found


def resolved(flags: tuple[str, ...], ranks: int) -> None:
    """Raises UserError for what the program refuses."""
    resolve(parse_arguments(list(flags)).config, ranks, VOCABULARY)


def faults(case: Case, worlds: Worlds) -> list[str]:
    """What is not the same as in one process."""
    one_only = tuple(name for name in case.patches if name != "recorded")
    with one_thread():
        one = run_case(case.flags, one_only)
    try:
        ranks = worlds(case.ranks).run(run_case, case.flags + case.layout, case.patches)
    except RankError as error:
        return [str(error)]
    return compare.fp64(one, ranks, zero=case.zero)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="that of the first case")
    parser.add_argument("--out", help="write the results to this JSON file")
    arguments = parser.parse_args()
    worlds, begun, off, refused = Worlds(), time.monotonic(), {}, 0
    for number in range(arguments.cases):
        draw = Draw(arguments.seed + number)
        case = draw.case()
        refused += draw.refused
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
            "refused draws": refused,
            "minutes": minutes,
            "off": off,
        }
        Path(arguments.out).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
