"""The table of parity: features in layouts, in several precisions."""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from check_parity import Words, read_layout  # noqa: E402
from flag_tables import read_table  # noqa: E402
from megatron.tools._study.equal_work import UNIT_ROUNDOFF  # noqa: E402

GLOBAL_BATCH = 8
BASE = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 8 --seq-length 16
--global-batch-size {GLOBAL_BATCH} --train-iters 3
--mock-data --tokenizer-type NullTokenizer --vocab-size 49 --make-vocab-size-divisible-by 1
--lr 1e-2 --lr-decay-style constant --lr-warmup-iters 2 --log-interval 1
--eval-iters 1 --log-params-norm""".split()
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    f"{NO_DROPOUT}"
)
GROUPED = (
    f"{LLAMA} --group-query-attention --num-query-groups 2 --qk-layernorm "
    "--untie-embeddings-and-output-weights"
)
RATES = (
    "--lr-decay-style cosine --decoupled-lr 3e-2 --decoupled-min-lr 2e-3 --min-lr 1e-3 "
    "--lr-warmup-init 1e-3 --lr-warmup-iters 1"
)
# tiles of 128 on each of two ranks, in both directions and over the tokens of a micro-batch
FP8 = f"""{LLAMA} --hidden-size 256 --ffn-hidden-size 256 --num-attention-heads 4
--kv-channels 64 --seq-length 128 --global-batch-size 4 --fp8-min-width 128
--group-query-attention --num-query-groups 2"""
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24"
LATENT = (
    "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 6 --qk-layernorm"
)
LATENT_YARN = (
    "--position-embedding-type yarn --rope-scaling-factor 4 "
    "--rope-original-max-position-embeddings 8 --rotary-base 100 --mscale 0.7 --mscale-all-dim 1.2"
)
BY_SAMPLE = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 3e-2"


# What is added to all keys alike moves all scores of a query alike, which softmax ignores (unless
# positions or caps come between): the gradient is rounding noise, its relative error means nothing.
KEY_BIAS = "attention.k.bias", "attention.v.bias"
KEY_NORM_BIAS = "attention.k_norm.bias", "attention.q_norm.bias"


@dataclass(frozen=True)
class Feature:
    """Flags on top of BASE (a later flag wins), and patches of worker.py."""

    flags: str
    patches: tuple[str, ...] = ()
    # of a step, on each data-parallel rank (None: what GLOBAL_BATCH leaves)
    micro_batches: int | None = None
    micro_batch: int | None = None  # samples of one, where its size is a part of the definition
    # flags of the layout's run that the one process does without: they must not change a number
    extra: str = ""
    is_slow: bool = False  # compiles for most of a minute: its rows are of `full` alone
    # ending of parameters whose exact gradient is 0, and of those that they are held against
    zero: tuple[str, str] | None = None


WORDS = {
    "NO_DROPOUT": NO_DROPOUT,
    "LLAMA": LLAMA,
    "LLAMA_DROPOUT": LLAMA.replace(NO_DROPOUT, ""),
    "UNTIED": "--untie-embeddings-and-output-weights",
    "GROUPED": GROUPED,
    "DOCUMENTS": "--reset-position-ids --reset-attention-mask --eod-mask-loss",
    "RATES": RATES,
    "FULL": "--recompute-granularity full",
    "SELECTIVE": "--recompute-granularity selective --recompute-modules",
    "FP8": FP8,
    "MOE": f"{LLAMA} {EXPERTS}",
    "MLA": f"{LLAMA} {LATENT}",
    "MLA_DEEP": f"{LLAMA} {LATENT} --q-lora-rank 24",
    "BY_SAMPLE": BY_SAMPLE,
}
# 50 real tokens: no multiple of 4 or 8, so padded rows lie on the last ranks. Fields are those of
# Feature; `zero` names one of the pairs above.
TABLE = f"""
# tied, learned positions, LayerNorm, biases, gelu
gpt: NO_DROPOUT
    zero: KEY_BIAS
# 0.1 in hidden states and attention
dropout:
    zero: KEY_BIAS
llama: LLAMA UNTIED --log-num-zeros-in-grad
gqa2-qknorm: GROUPED
mqa-qknorm-bias: NO_DROPOUT --group-query-attention --num-query-groups 1 --qk-layernorm
    zero: KEY_NORM_BIAS
gqa4-qkvbias: LLAMA --group-query-attention --num-query-groups 4 --add-qkv-bias --num-layers 1
mqa-bias: NO_DROPOUT --group-query-attention --num-query-groups 1
    zero: KEY_BIAS
# ranks that hold padding alone
padding: LLAMA UNTIED --make-vocab-size-divisible-by 64
documents: DOCUMENTS
    zero: KEY_BIAS
documents-rope: LLAMA DOCUMENTS --window-size 6
uneven: NO_DROPOUT
    patches: uneven
    zero: KEY_BIAS
caps-zloss: NO_DROPOUT --attn-logit-softcapping 3 --final-logit-softcapping 2 --z-loss-coeff 1e-2
        --num-layers 3
fused-head: NO_DROPOUT --final-logit-softcapping 2 --z-loss-coeff 1e-2
    patches: few_tokens
    extra: --fused-linear-cross-entropy
    zero: KEY_BIAS
ramp-up: --rampup-batch-size 4 4 4
    zero: KEY_BIAS
recompute: FULL --recompute-method uniform --recompute-num-layers 1 --geglu
    zero: KEY_BIAS
sgd: --optimizer sgd --lr 0.1 LLAMA
# as Mixtral, with losses by sample: how a batch is cut into micro-batches changes nothing
moe: MOE BY_SAMPLE --moe-z-loss-coeff 1e-2
# as DeepSeek-V3, with dropout, jitter and the shares of the step before
moe-bias: LLAMA_DROPOUT --num-experts 8 --moe-ffn-hidden-size 24
        --moe-router-score-function sigmoid --moe-router-enable-expert-bias
        --moe-router-bias-update-rate 2e-2 --moe-router-num-groups 4 --moe-router-group-topk 2
        --moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 16
        --moe-shared-expert-gate --moe-router-load-balancing-type global_aux_loss seq_aux_loss
        --moe-aux-loss-coeff 5e-2 1e-2 --moe-input-jitter-eps 0.1
# the layer in the middle is paired with itself
moe-odd: MOE BY_SAMPLE --num-layers 3 SELECTIVE moe moe_act core_attn layernorm
# what is defined by micro-batches; dense layers between those with experts
moe-capacity: MOE --moe-aux-loss-coeff 3e-2 --moe-router-pre-softmax --moe-layer-freq 2
        --moe-expert-capacity-factor 0.8
    micro_batch: 1
moe-position: MOE --moe-expert-capacity-factor 0.7 --moe-token-drop-policy position
        SELECTIVE moe layernorm
    micro_batch: 2
moe-recompute: MOE BY_SAMPLE FULL --moe-router-score-function sqrtsoftplus
        --moe-shared-expert-intermediate-size 16
moe-act: MOE --moe-router-topk 1 --moe-router-pre-softmax SELECTIVE moe_act core_attn
# more experts than tokens of a rank: many have none
moe-sparse: MOE --num-experts 64 --moe-ffn-hidden-size 8 --moe-router-topk 4
moe-forced: MOE --moe-router-force-load-balancing
# weights of experts in float64; metrics of each layer
moe-wide: MOE BY_SAMPLE --moe-router-dtype fp64 --moe-per-layer-logging
# fewer than 4 pipeline ranks
m3:
    micro_batches: 3
    zero: KEY_BIAS
m5: LLAMA UNTIED
    micro_batches: 5
# two rates: the word embedding and the head's matrix have their own, tied or not
decoupled: NO_DROPOUT RATES
    zero: KEY_BIAS
decoupled-untied: LLAMA UNTIED --log-num-zeros-in-grad RATES
# quantised numbers are the same in all layouts, so the fp64 gate holds for 4-bit mantissas
fp8-tensors: FP8 --fp8-format hybrid --fp8-recipe tensorwise
    micro_batch: 1
fp8-rows: FP8 --fp8-format hybrid --fp8-recipe rowwise
    micro_batch: 1
fp8-blocks: FP8 --fp8-format e4m3 --fp8-recipe blockwise
    micro_batch: 1
fp8-blocks-some: FP8 --fp8-format e4m3 --fp8-recipe blockwise --no-fp8-wgrad
        --first-last-layers-bf16 --num-layers-at-end-in-bf16 0
    micro_batch: 1
# the MLP over pieces of the sequence, in the layout alone
tiled: LLAMA
    extra: --tiled-mlp 4
tiled-dropout:
    extra: --tiled-mlp 2
    zero: KEY_BIAS
tiled-recompute: FULL --recompute-method uniform --recompute-num-layers 1 --geglu
    extra: --tiled-mlp 4
    zero: KEY_BIAS
# pieces of 128 tokens, which are blocks of the whole as well
tiled-fp8: FP8 --seq-length 256 --fp8-format e4m3 --fp8-recipe blockwise
    micro_batch: 1
    extra: --tiled-mlp 2
# compiled in the layout alone; traced: the operators of the graphs are run one by one
traced: GROUPED
    patches: traced
    extra: --torch-compile
traced-fp8: FP8 --fp8-format e4m3 --fp8-recipe blockwise
    patches: traced
    extra: --torch-compile
    micro_batch: 1
    is_slow: 1
traced-documents: DOCUMENTS FULL
    patches: traced
    extra: --torch-compile
    is_slow: 1
    zero: KEY_BIAS
# generated code writes one tensor over another as soon as that has been read
compiled: GROUPED
    extra: --torch-compile
    is_slow: 1
# windows and rotary positions of some layers, counted over all pipeline stages
layer-kinds: LLAMA --num-layers 4 --window-size 5 --window-attn-skip-freq 2 --no-rope-freq 3
layer-kinds-documents: LLAMA DOCUMENTS --num-layers 4 --window-size 6 --window-attn-skip-freq 3
        --no-rope-freq 2 --qk-layernorm
layer-kinds-recompute: LLAMA_DROPOUT --num-layers 4 --window-size 5 --window-attn-skip-freq 2
        --no-rope-freq 3 FULL --recompute-method uniform --recompute-num-layers 2
# as DeepSeek-V3: narrow queries, YaRN, values narrower than keys
mla: MLA_DEEP {LATENT_YARN}
# all scores in memory, queries of the token itself
mla-dropout: LLAMA_DROPOUT {LATENT} --v-head-dim 12
mla-documents: MLA_DEEP DOCUMENTS --window-size 6
mla-up: MLA_DEEP SELECTIVE mla_up_proj core_attn layernorm
mla-qkv: MLA SELECTIVE qkv
# what the layer in the middle computes again while its other pass is in a pair with it
mla-odd: MLA_DEEP {EXPERTS} BY_SAMPLE --num-layers 3 SELECTIVE qkv mla_up_proj
mla-full: MLA_DEEP FULL --normalization LayerNorm
# biases in the output projection, no norms of the latents
mla-bias: NO_DROPOUT {LATENT} --q-lora-rank 24 --no-qk-layernorm --position-embedding-type rope
# replayed from the second step on
mla-graphs: MLA_DEEP --train-iters 3
    patches: recorded
    extra: --cuda-graphs
mla-moe: MLA_DEEP {LATENT_YARN} {EXPERTS} BY_SAMPLE --moe-router-score-function sigmoid
        --moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 16
        --moe-layer-freq [0]*1+[1]*1
"""
READERS = {  # the others are numbers
    "patches": lambda text: tuple(text.split()),
    "extra": str,
    "zero": {"KEY_BIAS": KEY_BIAS, "KEY_NORM_BIAS": KEY_NORM_BIAS}.get,
}
FEATURES = {
    name: Feature(flags, **{field: READERS.get(field, int)(text) for field, text in fields})
    for name, flags, fields in read_table(TABLE, WORDS)
}

SCHEDULES = ("gpipe", "1f1b", "interleaved v2", "zero-bubble", "zero-bubble-v")
SPLITS = {  # a word of a layout: flags and the number of layers; the uneven ones
    "first3": ("--decoder-first-pipeline-num-layers 3", 4),
    "drawn": ("--pipeline-model-parallel-layout E|tttL", 3),
    "counted": (
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        6,
    ),
}


def wire_bound(parts: int) -> float:
    """Relative error of an fp32 gradient that is sent in bf16 in `parts` parts: one of each
    data-parallel rank, at ZeRO 2 and 3 one of each of its micro-batches. Each part is rounded, at
    stage 0 their sum too. Gradients of different samples are about orthogonal, so the norms of N
    parts add up to sqrt(N) times that of the sum: u sqrt(N) + u.
    """
    return UNIT_ROUNDOFF["bf16"] * (1 + math.sqrt(parts))


SGD = "--optimizer sgd --lr 0.1 --weight-decay 0 --clip-grad 0"
PRECISIONS = {
    "fp64": "--fp64",
    "fp32": SGD,
    "wire": f"{SGD} --grad-reduce-in-bf16",
    "bf16": f"{SGD} --bf16",
    "grads": f"{SGD} --bf16 --main-grads-dtype bf16",
    # so low that nothing overflows but what is made to
    "fp16": f"{SGD} --fp16 --initial-loss-scale 1024 --loss-scale-window 3",
}


def last_number(flags: list[str] | tuple[str, ...], flag: str) -> int:
    """The last value of a flag, which wins."""
    return int(flags[len(flags) - flags[::-1].index(flag)])


@dataclass(frozen=True)
class Row:
    """One case of the table."""

    layout: str
    feature: str
    precision: str = "fp64"
    steps: int = 2  # in fp64: the second reads what the first has updated

    def __str__(self) -> str:
        return f"{self.precision}-{self.feature}-{self.layout.replace(' ', '-')}"

    @property
    def of(self) -> Feature:
        """What its feature is."""
        return FEATURES[self.feature]

    @functools.cached_property
    def words(self) -> Words:
        """The layout, read."""
        words = self.layout.split()
        read = read_layout(" ".join(word for word in words if word not in SPLITS))
        split = " ".join(SPLITS[word][0] for word in words if word in SPLITS)
        return read._replace(flags=(*read.flags, *split.split()))

    @property
    def world(self) -> int:
        return self.words.ranks

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return next((stage for stage in (1, 2, 3) if f"zero{stage}" in self.layout.split()), 0)

    @property
    def layers(self) -> int:
        """As few as show that a layer is not like the others; under `auto` every stage is one
        unit.
        """
        words = self.layout.split()
        if self.words.pp == 1:
            return last_number([*BASE, *self.of.flags.split()], "--num-layers")
        for word in words:
            if word in SPLITS:
                return SPLITS[word][1]
        virtual = 1 + ("zero-bubble-v" in words)
        if "interleaved" in words:
            virtual = int(words[words.index("interleaved") + 1][1:])
        stages = self.words.pp * virtual
        return stages - 2 if "auto" in words else max(4, stages)

    @property
    def patches(self) -> tuple[str, ...]:
        return self.of.patches + (("overflow",) if self.precision == "fp16" else ())

    @property
    def parts(self) -> int:
        """How many gradients are sent and added up in a step."""
        flags = self.flags(layout=True)
        samples, micro_batch = (
            last_number(flags, flag) for flag in ("--global-batch-size", "--micro-batch-size")
        )
        return samples // micro_batch if self.stage >= 2 else self.words.dp

    def flags(self, *, layout: bool, exact: bool = False) -> tuple[str, ...]:
        """The command line, of the layout or of one process, in the row's precision or (`exact`)
        the same run in fp64.
        """
        # the bound of `narrow` holds over 7 or more steps
        steps = self.steps if self.precision == "fp64" else 8
        precision = PRECISIONS[self.precision]
        if exact:  # the row's optimizer, nothing narrow
            precision = f"{SGD} --fp64 --nan-policy skip"
        own = f"--train-iters {steps} {self.of.flags} {precision}".split()
        if self.words.pp > 1:
            own += ["--num-layers", str(self.layers)]
        if self.of.micro_batches:
            own += ["--global-batch-size", str(self.of.micro_batches)]
        own += ["--micro-batch-size", str(self.micro_batch(layout))]
        if layout:
            own += [*self.of.extra.split(), *self.words.flags]
        return *BASE, *own

    def micro_batch(self, layout: bool) -> int:
        """Samples of one, in the layout or in one process."""
        words = self.words
        if self.of.micro_batch:
            return self.of.micro_batch
        if layout and "paired" in self.layout.split():
            return 1  # several pairs
        if words.pp > 1:
            # eight micro-batches, or four; as many in one process, or the rounding of other sums
            # grows
            return 2 if words.tp > 1 == words.dp else 1
        # two micro-batches a step where the ranks leave as many samples
        return max(1, GLOBAL_BATCH // (2 * (words.dp if layout else 1)))


# Every feature with layouts that show each axis, schedule and ZeRO stage with it; then those of
# single features, see `read_rows`.
ROWS = """
dropout: tp2 sp, pp2 zero-bubble drawn, pp2 zero-bubble-v counted, tp2 sp dp2 mapping
dropout: pp2 zero-bubble-v dp2 serial, pp4 interleaved v2 auto, pp2 gpipe dp2 zero2
dropout: pp2 zero-bubble dp2 zero1, pp2 1f1b dp2 zero3 kept
gpt: dp2, pp2 zero-bubble drawn, pp2 zero-bubble-v counted, dp2 serial zero1, dp2 zero3 kept
gpt: tp4 sp, dp4, tp2 dp2, tp2 sp dp2, tp2 sp dp2 serial, tp2 sp dp2 mapping, pp2 gpipe tp2 sp
gpt: pp2 interleaved v2 tp2 sp, pp2 zero-bubble-v tp2 sp, pp2 1f1b dp2 zero2
gpt: pp2 zero-bubble dp2 zero2, pp2 zero-bubble dp2 zero3, pp2 zero-bubble-v dp2 zero1, tp8 sp
gpt: dp8, tp4 dp2, tp4 sp dp2, tp2 dp4, tp2 sp dp4, pp4 1f1b auto dp2 zero3
mqa-bias: tp2 sp, pp2 1f1b, dp2 zero1, dp2 zero2, dp2 zero3 kept, tp2 sp dp2 mapping
mqa-bias: pp2 zero-bubble tp2 sp, pp2 interleaved v2 dp2, pp4 zero-bubble-v
documents: tp2 sp, pp2 zero-bubble drawn, pp2 zero-bubble-v counted, pp2 gpipe dp2 zero2
documents: pp2 zero-bubble-v dp2 zero3 kept, pp2 interleaved v2 tp2 dp2 mapping
documents: pp4 1f1b auto dp2 zero1
ramp-up: tp2 sp, pp2 interleaved v2, pp2 zero-bubble drawn, pp2 zero-bubble-v counted
ramp-up: dp2 zero3 kept, tp2 sp dp2 mapping, pp2 gpipe dp2 zero1, pp4 1f1b auto dp2 zero2
recompute: tp2 sp, pp2 zero-bubble drawn, pp2 zero-bubble-v counted, dp2 zero3 kept
recompute: tp2 sp dp2 mapping, pp4 1f1b auto, pp2 gpipe dp2 zero1, pp2 interleaved v2 dp2 zero2
mqa-qknorm-bias: dp2 serial, pp2 1f1b, dp2 zero1, dp2 zero2, tp2 sp dp2 mapping
mqa-qknorm-bias: pp2 zero-bubble tp2 sp, pp2 interleaved v2 dp2, pp4 zero-bubble-v
mqa-qknorm-bias: tp2 sp dp2 zero3 kept
uneven: pp2 gpipe, pp2 zero-bubble drawn, pp2 zero-bubble-v counted, dp2 serial zero2
uneven: dp2 zero3 kept, tp2 sp dp2 mapping, pp4 1f1b auto, tp2 sp dp2 zero1
uneven: pp2 interleaved v2 dp2 zero3
m3: pp2 gpipe, pp2 interleaved v2, pp2 zero-bubble drawn, pp2 zero-bubble-v counted, pp4 1f1b auto
m5: pp2 interleaved v2, pp2 zero-bubble drawn, pp2 zero-bubble-v counted, pp4 1f1b auto
llama: pp2 zero-bubble drawn, pp2 zero-bubble-v counted, dp2 serial zero2, dp2 zero3 kept
llama: tp2 sp dp2 mapping, pp4 1f1b auto, pp2 gpipe dp2 zero3, pp2 interleaved v2 dp2 zero1
gqa2-qknorm: pp2 1f1b, dp2 zero1, dp2 serial zero3, dp2 zero3 kept, tp4, tp2 sp dp2 mapping
gqa2-qknorm: pp2 zero-bubble tp2 sp, pp2 interleaved v2 dp2, pp4 zero-bubble-v, tp2 sp dp2 zero2
gqa4-qkvbias: pp2 1f1b, dp2 zero2, dp2 serial zero1, dp2 zero3 kept, tp2 sp dp2 mapping
gqa4-qkvbias: pp2 zero-bubble tp2 sp, pp2 interleaved v2 dp2, pp4 zero-bubble-v, tp8
padding: pp2 1f1b, dp2 zero2, dp2 serial zero1, dp2 zero3 kept, tp2 sp dp2 mapping
documents-rope: pp2 1f1b, dp2 zero2, dp2 serial zero1, dp2 zero3 kept, tp2 sp dp2 mapping
caps-zloss: pp2 1f1b, dp2 zero2, dp2 serial zero1, dp2 zero3 kept, tp2 sp dp2 mapping
caps-zloss: pp2 zero-bubble tp2 sp, pp2 interleaved v2 dp2, pp4 zero-bubble-v
fused-head: pp2 1f1b, dp2 zero2, dp2 serial zero1, dp2 zero3 kept, tp2 sp dp2 mapping
fused-head: pp2 zero-bubble tp2 sp, pp2 interleaved v2 dp2, pp4 zero-bubble-v
sgd: pp2 1f1b, dp2 zero2, dp2 serial zero1, dp2 zero3 kept, tp2 sp dp2 mapping
layer-kinds: dp2 zero2, dp2 serial zero1, dp2 zero3 kept, tp2 sp dp2 mapping
layer-kinds: pp2 zero-bubble tp2 sp, pp2 interleaved v2 dp2, pp4 zero-bubble-v
fp32 gqa2-qknorm: tp2 sp, tp4
fp32 documents-rope: pp2 gpipe
fp32 gpt: pp2 1f1b, pp2 interleaved v2, dp2 zero3 kept, pp2 zero-bubble dp2 zero1
fp32 gpt: pp2 zero-bubble-v dp2 zero2
wire gpt: dp2 zero3 kept, tp2 sp dp2 mapping, pp2 1f1b dp2, pp2 zero-bubble-v dp2 zero2
wire gqa2-qknorm: tp2 sp dp2 serial, tp4 dp2
wire documents-rope: pp2 zero-bubble dp2 zero1
bf16 gqa2-qknorm: tp2 sp, tp4 sp
bf16 documents-rope: pp2 gpipe
bf16 gpt: pp2 1f1b, pp2 interleaved v2, dp2 zero3 kept, pp2 zero-bubble dp2 zero1
bf16 gpt: pp2 zero-bubble-v dp2 zero2
fp16 gqa2-qknorm: tp2 sp, tp4 sp
fp16 documents-rope: pp2 gpipe
fp16 gpt: pp2 1f1b, pp2 interleaved v2, dp2 zero3 kept, pp2 zero-bubble dp2 zero1
fp16 gpt: pp2 zero-bubble-v dp2 zero2
grads gpt: dp2 zero2, pp2 zero-bubble dp2 zero3
dropout: cp2 allgather, cp2 p2p, cp4 a2a2+p2p, cp2 dp2 zero1 allgather, cp2 dp2 zero1 p2p
dropout: cp2 pp2 zero-bubble-v dp2 zero2 a2a, cp2 pp2 zero-bubble-v dp2 zero2 p2p
gpt: cp4 p2p, cp2 dp2 zero2 a2a, cp2 dp2 zero2 p2p, cp4 a2a
llama: cp2 tp2 sp allgather, cp2 zero3 a2a, cp2 tp2 sp p2p, cp4 zero3 p2p
llama: cp2 pp2 zero-bubble tp2 sp p2p, cp2 pp2 zero-bubble tp2 sp a2a
llama: cp4 pp2 zero-bubble a2a2+p2p
gqa2-qknorm: cp4 p2p, cp4 tp2 sp a2a2+p2p, cp4 a2a, cp4 allgather
mqa-qknorm-bias: cp2 allgather, cp2 p2p, cp4 a2a2+p2p
gqa4-qkvbias: cp2 dp2 shard2 zero3 allgather, cp2 dp2 shard2 zero3 p2p
gqa4-qkvbias: cp4 pp2 interleaved v2 allgather, cp4 pp2 interleaved v2 p2p
mqa-bias: cp4 allgather, cp4 a2a
documents: cp2 allgather, cp2 p2p, cp2 dp2 zero3 a2a
documents-rope: cp2 a2a, cp4 p2p, cp2 tp2 allgather, cp2 pp2 1f1b a2a, cp2 pp2 1f1b p2p
documents-rope: cp4 a2a2+p2p
caps-zloss: cp2 allgather, cp2 p2p
recompute: cp2 a2a, cp2 p2p, cp4 zero3 a2a2+p2p
bf16 gqa2-qknorm: cp2 tp2 sp
bf16 documents-rope: cp4 p2p, cp2 a2a
bf16 dropout: cp2 p2p
fp16 gpt: cp4 zero3
wire gpt: cp2 dp2 zero2
moe: dp2, dp4 ep4, dp4 ep2 zero2, dp4 ep2 shard2 zero3, tp2 sp, tp2 sp etp1 ep2
moe: tp4 sp etp2 ep2, dp4 etp2 ep2, cp2 tp2 sp ep2 etp2, pp2 1f1b mapping dp2 ep2
moe: pp2 interleaved v2 dp2 ep2 paired zero2, pp2 zero-bubble-v tp2 sp etp1 ep2
moe: dp4 ep2 offload zero2
moe-bias: dp2 ep2, dp4 ep2 paired zero1, dp4 ep2 zero3, tp2 sp etp1, cp2 ep2
moe-bias: tp2 sp etp2 ep2 dp2 paired, pp2 1f1b dp2 ep2 paired zero3
moe-bias: pp2 zero-bubble dp2 ep2 zero2, dp4 ep2 param-offload zero3
moe-recompute: dp4 ep4 zero3, tp2 sp etp1 ep4 dp2 zero1, cp2 p2p dp2 ep4 paired zero2
moe-recompute: pp2 zero-bubble dp2 ep2, tp2 sp etp2 ep2 dp2, dp4 ep4 paired zero2
moe-capacity: cp2 ep2, dp2 ep2, tp2 sp etp1 ep2 paired
moe-position: cp2 tp2 sp ep2, pp2 zero-bubble dp2 ep2
moe-act: dp4 ep2 shard2 zero3 kept paired, pp2 zero-bubble-v dp2 ep2
moe-sparse: dp4 ep4 paired, tp2 sp dp2 ep2 etp2 zero2
moe-forced: dp2 ep2
moe-odd: dp2 ep2 paired, tp2 sp etp1 ep2 dp2 paired zero3
moe-wide: dp2 ep2
bf16 moe-wide: tp2 sp etp1 ep2
bf16 moe: dp4 ep2 paired zero2, tp2 sp etp1 ep2, dp4 ep2 zero3
wire moe: dp4 ep2
grads moe: dp4 ep2
fp16 moe-bias: dp2 ep2, pp2 zero-bubble dp2 ep2 zero3
mla: tp2, tp2 sp, cp2, cp2 p2p, dp2 zero1, pp2 1f1b, pp2 zero-bubble, dp2 offload zero2
mla-bias: tp4, tp4 sp, tp2 sp dp2 zero3
mla-full: tp2 sp
mla-dropout: tp2 sp dp2, cp2, cp2 p2p tp2 sp, pp2 interleaved v2
mla-documents: tp2 sp, cp2 tp2 sp, cp2 p2p
mla-up: tp2 sp, cp2 a2a, dp2 zero3, pp2 zero-bubble tp2 sp
mla-qkv: tp2 sp, dp2 zero2, pp2 zero-bubble-v dp2
mla-moe: dp2 ep2, tp2 sp etp1 ep2
mla-odd: dp2 ep2 paired
mla-graphs: dp2
bf16 mla: tp2 sp, pp2 zero-bubble tp2 sp
layer-kinds: cp2, cp2 p2p, cp2 a2a, pp2 zero-bubble-v
layer-kinds-documents: pp2 interleaved v2, cp2 p2p, tp2 sp
layer-kinds-recompute: pp2 1f1b, dp2 zero2
decoupled: tp2 dp2 zero2, dp2 zero1, cp2 zero2, pp2 1f1b, pp2 zero-bubble-v dp2 zero2
decoupled-untied: tp2 sp dp2 zero3, pp2 1f1b
fp8-tensors: tp2, tp2 sp, dp2 zero3, cp2, cp2 a2a tp2 sp, pp2 zero-bubble tp2 sp
fp8-rows: tp2, tp2 sp, cp2
fp8-blocks: tp2, tp2 sp, pp2 1f1b dp2 zero2
fp8-blocks-some: tp2 sp, cp2 tp2
tiled: tp2 sp, tp4 sp, cp2 tp2 sp, dp2 zero3, pp2 interleaved v2, pp2 zero-bubble tp2 sp
tiled-dropout: tp2, tp2 sp, cp2 a2a, dp2 zero1, pp2 zero-bubble-v dp2 zero2
tiled-recompute: tp2 sp, dp2 zero3 kept, pp2 1f1b, pp2 zero-bubble dp2 zero3
tiled-fp8: tp2
bf16 tiled: tp2 sp
wire tiled: dp2 zero2
traced: tp2 sp, pp2 zero-bubble tp2 sp, pp2 1f1b dp2 zero3
traced-documents: tp2 sp, dp2 zero3
traced-fp8: tp2 sp
bf16 traced: tp4 sp, tp2 sp
compiled: pp2 zero-bubble
bf16 compiled: tp2 sp
"""


def read_row(text: str) -> Row:
    """The row of `[precision] feature layout`."""
    words = text.split()
    precision = [words.pop(0)] if words[0] in PRECISIONS else []
    return Row(" ".join(words[1:]), words[0], *precision)


def read_rows(text: str) -> list[Row]:
    """Rows of lines `[precision] feature: layout, layout, ...`."""
    found = []
    for line in text.strip().splitlines():
        described, layouts = line.split(": ")
        found += [read_row(f"{described} {layout}") for layout in layouts.split(", ")]
    return found


@functools.cache
def ci_rows() -> list[Row]:
    """The rows of `full`, small worlds first: those of the table and those that mutants name."""
    from parity.mutants import MUTANTS, row_of

    rows = [*read_rows(ROWS), *map(row_of, MUTANTS)]
    return sorted(dict.fromkeys(rows), key=lambda row: row.world)
