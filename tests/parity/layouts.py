"""The table of parity: layouts x features x precisions, and the part of it that CI runs."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from check_parity import read_layout  # noqa: E402

GLOBAL_BATCH = 8
BASE = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 8 --seq-length 16 --global-batch-size {GLOBAL_BATCH} --train-iters 20
--mock-data --tokenizer-type NullTokenizer --vocab-size 49 --make-vocab-size-divisible-by 1 --lr 1e-2 --lr-warmup-iters 3 --log-interval 1
--eval-iters 1 --log-params-norm""".split()
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
LLAMA = f"--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear {NO_DROPOUT}"


# What is added to all keys alike moves all scores of a query alike, which softmax ignores (unless positions or caps come between): the
# gradient is rounding noise, its relative error means nothing.
KEY_BIAS = "attention.k.bias", "attention.v.bias"
KEY_NORM_BIAS = "attention.k_norm.bias", "attention.q_norm.bias"


@dataclass(frozen=True)
class Feature:
    """Flags on top of BASE (a later flag wins), and patches of worker.py."""

    flags: str
    patches: tuple[str, ...] = ()
    most_dp: int = 8  # data-parallel ranks that its smallest global batch feeds
    zero: tuple[str, str] | None = None  # ending of parameters whose exact gradient is 0, and of those that they are held against


# 50 real tokens: no multiple of 4 or 8, so padded rows lie on the last ranks.
FEATURES = {
    "gpt": Feature(NO_DROPOUT, zero=KEY_BIAS),  # tied, learned positions, LayerNorm, biases, gelu
    "dropout": Feature("", zero=KEY_BIAS),  # 0.1 in hidden states and attention
    "llama": Feature(f"{LLAMA} --untie-embeddings-and-output-weights --log-num-zeros-in-grad"),
    "gqa2-qknorm": Feature(f"{LLAMA} --group-query-attention --num-query-groups 2 --qk-layernorm --untie-embeddings-and-output-weights"),
    "mqa-qknorm-bias": Feature(f"{NO_DROPOUT} --group-query-attention --num-query-groups 1 --qk-layernorm", zero=KEY_NORM_BIAS),
    "gqa4-qkvbias": Feature(f"{LLAMA} --group-query-attention --num-query-groups 4 --add-qkv-bias --num-layers 1"),
    "mqa-bias": Feature(f"{NO_DROPOUT} --group-query-attention --num-query-groups 1", zero=KEY_BIAS),
    "padding": Feature(f"{LLAMA} --make-vocab-size-divisible-by 64 --untie-embeddings-and-output-weights"),  # ranks that hold padding alone
    "documents": Feature("--reset-position-ids --reset-attention-mask --eod-mask-loss", zero=KEY_BIAS),
    "documents-rope": Feature(f"{LLAMA} --reset-position-ids --reset-attention-mask --eod-mask-loss --window-size 6"),
    "uneven": Feature(NO_DROPOUT, patches=("uneven",), zero=KEY_BIAS),
    "caps-zloss": Feature(f"{NO_DROPOUT} --attn-logit-softcapping 3 --final-logit-softcapping 2 --z-loss-coeff 1e-2 --num-layers 3"),
    "ramp-up": Feature("--rampup-batch-size 4 4 40", most_dp=4, zero=KEY_BIAS),
    "recompute": Feature("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --geglu", zero=KEY_BIAS),
    "sgd": Feature(f"--optimizer sgd --lr 0.1 {LLAMA}"),
}

LAYOUTS = (
    "tp2", "tp2 sp", "dp2", "tp2 sp serial", "dp2 serial", "tp4", "tp4 sp", "dp4", "tp2 dp2", "tp2 sp dp2", "tp2 sp dp2 serial", "tp2 sp dp2 mapping",
    "tp8", "tp8 sp", "dp8", "tp4 dp2", "tp4 sp dp2", "tp2 dp4", "tp2 sp dp4",
)

# Unit roundoffs. A run of L layers rounds each activation about 12 L + 4 times on its way (a layer: norm 2, fused projection, rotary,
# scores, probabilities, context, output and residual, up, activation, down and residual; embedding 2, final norm, logits), and as often on
# the way back. Roundings are independent and each at most u of what it touches, so the relative error of a gradient is about u sqrt(2n) with
# n = 12 L + 4; that of the loss, which averages over tokens, is below u sqrt(n). Twice that is the bound: where a layout rounds at other places
# (partial sums before they are added over ranks), it adds no more roundings than there were.
UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}


def narrow_bound(precision: str, layers: int = 2) -> float:
    """Relative error of a narrow run's gradients of step 1 and of its losses against fp64."""
    return 2 * UNIT_ROUNDOFF[precision] * math.sqrt(2 * (12 * layers + 4))


def wire_bound(ranks: int) -> float:
    """Relative error of an fp32 gradient reduced in bf16 over data-parallel ranks. Each rank's part is rounded, then their sum. Gradients of
    different samples are about orthogonal, so the norms of N parts add up to sqrt(N) times that of the sum: u sqrt(N) + u."""
    return UNIT_ROUNDOFF["bf16"] * (1 + math.sqrt(ranks))


SGD = "--optimizer sgd --lr 0.1 --weight-decay 0 --clip-grad 0"
PRECISIONS = {
    "fp64": "--fp64",
    "fp32": SGD,
    "wire": f"{SGD} --grad-reduce-in-bf16",
    "bf16": f"{SGD} --bf16",
    "fp16": f"{SGD} --fp16 --initial-loss-scale 1024 --loss-scale-window 3",  # so low that nothing overflows but what is made to
}


@dataclass(frozen=True)
class Row:
    """One case of the table."""

    layout: str
    feature: str
    precision: str = "fp64"

    def __str__(self) -> str:
        return f"{self.precision}-{self.feature}-{self.layout.replace(' ', '')}"

    @property
    def world(self) -> int:
        return read_layout(self.layout)[0]

    @property
    def dp(self) -> int:
        return read_layout(self.layout)[3]

    @property
    def patches(self) -> tuple[str, ...]:
        return FEATURES[self.feature].patches + (("overflow",) if self.precision == "fp16" else ())

    def flags(self, *, layout: bool, exact: bool = False) -> tuple[str, ...]:
        """The command line, of the layout or of one process, in the row's precision or (`exact`) the same run in fp64."""
        own = f"{FEATURES[self.feature].flags} {PRECISIONS[self.precision]}".split()
        if exact:  # the row's optimizer, nothing narrow
            own = f"{FEATURES[self.feature].flags} {SGD} --fp64 --nan-policy skip".split()
        _, words, _, dp = read_layout(self.layout) if layout else (1, (), 1, 1)
        micro_batch = max(1, GLOBAL_BATCH // (2 * dp))  # two micro-batches a step where the ranks leave as many samples
        return (*BASE, "--micro-batch-size", str(micro_batch), *own, *words)


def possible(row: Row) -> bool:
    """Whether a feature's batch feeds the layout's data-parallel ranks."""
    return read_layout(row.layout)[3] <= FEATURES[row.feature].most_dp


NARROW_FEATURES = ("gpt", "gqa2-qknorm", "documents-rope")
NARROW_LAYOUTS = ("tp2", "tp2 sp", "dp2", "tp4 sp", "tp2 dp2", "tp2 sp dp2", "tp8 sp", "tp4 dp2")


def full_table() -> list[Row]:
    """Every layout with every feature in fp64; a choice of both in the other precisions."""
    rows = [Row(layout, feature) for layout, feature in product(LAYOUTS, FEATURES)]
    rows += [Row(layout, feature, "fp32") for layout, feature in product(LAYOUTS, FEATURES)
             if layout in NARROW_LAYOUTS and feature in NARROW_FEATURES or layout in ("tp2 sp dp2", "tp4")]
    rows += [Row(layout, feature, precision) for layout, feature, precision in product(NARROW_LAYOUTS, NARROW_FEATURES, ("bf16", "fp16"))]
    rows += [Row(layout, feature, "wire") for layout, feature in product(LAYOUTS, NARROW_FEATURES) if read_layout(layout)[3] > 1]
    return [row for row in rows if possible(row)]


def traits(row: Row) -> set[tuple[str, str]]:
    """The pairs that a row shows: its feature (in fp64) or precision with each axis of its layout; in fp64 its layout."""
    _, flags, tp, dp = read_layout(row.layout)
    words = FEATURES[row.feature].flags.split()
    groups = int(words[words.index("--num-query-groups") + 1]) if "--num-query-groups" in words else tp
    sequence = " with sp" if "--sequence-parallel" in flags else ""
    exact = row.precision == "fp64"
    axes = {
        "tp" + sequence: tp > 1, "dp": dp > 1, "tp x dp": tp > 1 and dp > 1, "kv heads shared" + sequence: exact and tp > groups,
    }
    what = row.feature if exact else row.precision
    shown = {(what, axis) for axis, on in axes.items() if on} | {(row.precision, row.feature)}
    return shown | {("layout", row.layout)} if exact else shown


# What CI runs of it, few on 8 ranks: feature: its layouts. It shows all traits (test_layouts.py).
CI = {
    "fp64": {
        "gpt": "tp2, dp2, dp2 serial, dp4, dp8, tp2 sp dp2",
        "dropout": "tp2, tp2 sp dp2 mapping",
        "llama": "tp2 sp serial, tp2 dp4",
        "gqa2-qknorm": "tp4 sp, tp4 dp2",
        "mqa-qknorm-bias": "tp2 sp, tp2 dp2",
        "gqa4-qkvbias": "tp8, tp8 sp, tp2 sp dp4",
        "mqa-bias": "tp2, tp2 sp dp2 serial",
        "padding": "tp2 sp, tp2 dp2",
        "documents": "tp2 sp, tp2 dp2",
        "documents-rope": "tp2 dp2, tp4 sp dp2",
        "uneven": "tp2 sp, tp2 dp2",
        "caps-zloss": "tp4, tp2 sp dp2",
        "ramp-up": "tp2 sp, tp2 dp2",
        "recompute": "tp2 sp, tp2 dp2",
        "sgd": "tp2 sp, tp2 dp2",
    },
    "fp32": {"gpt": "tp2 dp2", "gqa2-qknorm": "tp4 sp", "documents-rope": "tp2"},
    "bf16": {"gpt": "tp2 dp2", "gqa2-qknorm": "tp2 sp", "documents-rope": "tp2"},
    "fp16": {"gpt": "tp2 sp", "gqa2-qknorm": "tp2 dp2", "documents-rope": "tp2"},
    "wire": {"gpt": "dp2", "gqa2-qknorm": "tp2 sp dp2", "documents-rope": "tp2 dp2"},
}


def ci_rows() -> list[Row]:
    """The rows of CI, small worlds first."""
    rows = [Row(layout, feature, precision)
            for precision, table in CI.items() for feature, layouts in table.items() for layout in layouts.split(", ")]
    return sorted(rows, key=lambda row: row.world)
