"""The table of configurations in which the program is held against the oracle.

A case is a command line (BASE, then its own flags: a later one wins), the runs that follow the
first in the same folder (resumes), and the layout that the program alone is given.
"""

from __future__ import annotations

import functools
import json
import shlex
import struct
import tempfile
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from random import Random

import numpy as np
from flag_tables import read_table

VOCABULARY = 50  # 49 and the end of document
BASE = f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
    --micro-batch-size 2 --global-batch-size 4
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --init-method-std 0.2 --lr 1e-2
    --log-interval 1 --eval-interval 3 --eval-iters 2 --save {{save}}
"""
GPT = "--hidden-dropout 0 --attention-dropout 0"
LLAMA = f"""
    {GPT} --activation swiglu --normalization RMSNorm --position-embedding-type rope
    --disable-bias-linear --untie-embeddings-and-output-weights
"""
# What words in capitals stand for; {data} is the folder of corpora, {save} the run's own.
WORDS = {
    "FILES": "--data-path {data}/books --split 8,1,1",
    "MOCK": "--mock-data",
    "GPT": GPT,
    "LLAMA": LLAMA,
    "MOE": f"{LLAMA} --num-experts 8 --moe-ffn-hidden-size 24",
    "BIASED": """
        --moe-router-score-function sigmoid --moe-router-enable-expert-bias
        --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 4
        --moe-router-topk-scaling-factor 2.5 --moe-router-bias-update-rate 2e-2
    """,
    "DOCUMENTS": "--reset-attention-mask --reset-position-ids --eod-mask-loss",
    "FP16": f"--mock-data {LLAMA} --optimizer sgd --train-iters 8",
    "GAPS": f"""
        {LLAMA} --train-data-path {{data}}/gaps --seq-length 8 --eod-mask-loss
        --global-batch-size 1 --micro-batch-size 1 --train-iters 12
    """,
    "TP2": "--tensor-model-parallel-size 2",
    "SP": "--tensor-model-parallel-size 2 --sequence-parallel",
    "PP2": "--pipeline-model-parallel-size 2",
    "EP2": "--expert-model-parallel-size 2",
}


@dataclass(frozen=True)
class Case:
    """One row. `narrow`: not float64, so numbers agree within a bound of its precision."""

    name: str
    flags: str
    then: tuple[str, ...] = ()  # flags of the runs after the first, on top of those of the first
    first: str = ""  # flags of the first run alone
    layout: str = ""  # of every run, or of each in turn, with | between them
    ranks: int = 1
    narrow: str | None = None  # fp32, bf16, fp16

    def __str__(self) -> str:
        return self.name

    def layouts(self) -> list[list[str]]:
        """The layout's flags in each run."""
        each = [shlex.split(flags) for flags in self.layout.split("|")]
        return each if len(each) > 1 else each * (1 + len(self.then))

    def runs(self, save: str) -> list[list[str]]:
        """The command line of each run in turn, without the layout."""
        precision = {None: "--fp64", "fp32": ""}.get(self.narrow, f"--{self.narrow}")
        length = "" if "--train-samples" in self.flags else "--train-iters 5"
        text = f"{BASE} {length} {self.flags} {precision}"
        lines = [f"{text} {self.first}", *(f"{text} --load {{save}} {more}" for more in self.then)]
        return [shlex.split(line.format(data=corpora(), save=save)) for line in lines]


# Written by hand: what has a course in time, and what comes as one piece. Under a case's flags are
# those of the first run alone, those of each run that follows it, its layout on that many ranks,
# and its precision (flag_tables.py).
TABLE = """
gpt-dropout: MOCK
gpt-files: FILES GPT --activation gelu-tanh --init-method-std 0.02 --lr-decay-style cosine
        --lr-warmup-iters 2
llama: FILES LLAMA --log-params-norm --log-num-zeros-in-grad --clip-grad 0.5
llama-gqa-qknorm-window: FILES LLAMA --group-query-attention --num-query-groups 2 --qk-layernorm
        --window-size 7
documents: FILES DOCUMENTS --lr-decay-style constant --fused-linear-cross-entropy
documents-rope: FILES LLAMA DOCUMENTS --window-size 11 --hidden-dropout 0.2 --log-params-norm
caps-zloss: MOCK GPT --attn-logit-softcapping 2 --final-logit-softcapping 3 --z-loss-coeff 1e-2
        --num-layers 3
sgd: FILES --optimizer sgd --lr 0.1 --weight-decay 0.1 --sgd-momentum 0.8 --log-interval 2
shapes: MOCK LLAMA --num-attention-heads 6 --kv-channels 10 --ffn-hidden-size 48
        --group-query-attention --num-query-groups 3 --qk-layernorm --norm-epsilon 1e-3
        --adam-beta1 0.8 --adam-beta2 0.95 --adam-eps 1e-6 --micro-batch-size 1
        --make-vocab-size-divisible-by 1
layer-kinds: FILES LLAMA --num-layers 4 --window-size 7 --window-attn-skip-freq 2 --no-rope-freq 3
        --hidden-dropout 0.2
layer-kinds-listed: FILES LLAMA DOCUMENTS --num-layers 4 --window-size 9 --qk-layernorm
        --window-attn-skip-freq [0,1,1,0] --no-rope-freq [1,0,1,0] --recompute-granularity full
    on 4: PP2 --context-parallel-size 2

# Mixtures of experts: every score, loss, and way to leave tokens out.
moe: MOCK MOE --moe-aux-loss-coeff 3e-2 --moe-z-loss-coeff 1e-2
moe-documents: FILES MOE DOCUMENTS --moe-router-load-balancing-type aux_loss seq_aux_loss
        --moe-aux-loss-coeff 3e-1 2e-1 --moe-z-loss-coeff 1e-1
    on 2: EP2
moe-pre-softmax: FILES MOE --moe-router-pre-softmax --moe-router-topk 3 --moe-layer-freq 2
        --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 5e-2
        --moe-shared-expert-intermediate-size 24 --log-params-norm
moe-top-1: FILES MOE --moe-router-topk 1 --moe-router-pre-softmax --moe-aux-loss-coeff 1e-2
        --log-num-zeros-in-grad
moe-bias-groups: FILES MOE BIASED --moe-aux-loss-coeff 3e-2 1e-2 2e-2 --moe-input-jitter-eps 0.1
        --moe-router-load-balancing-type global_aux_loss seq_aux_loss aux_loss
        --moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate --log-params-norm
moe-bias-resume: FILES MOE BIASED --moe-router-load-balancing-type global_aux_loss
        --moe-aux-loss-coeff 5e-2 --train-iters 6
    first: --exit-interval 3
    then:
    on 2: | EP2
moe-sqrtsoftplus: FILES MOE --moe-router-score-function sqrtsoftplus --moe-aux-loss-coeff 2e-2
        --moe-layer-freq [0,1] --moe-router-topk-scaling-factor 1.5 --moe-z-loss-coeff 1e-2
moe-capacity-probs: MOCK MOE --moe-expert-capacity-factor 0.7 --moe-aux-loss-coeff 2e-2
moe-capacity-position: FILES MOE --moe-expert-capacity-factor 0.8 --moe-router-pre-softmax
        --moe-token-drop-policy position

# Schedules in samples and in iterations, through a ramp.
ramp-up: FILES LLAMA --rampup-batch-size 2 2 6 --global-batch-size 6 --lr-decay-style WSD
        --lr-wsd-decay-iters 2 --eod-mask-loss
ramp-up-resume: FILES LLAMA --rampup-batch-size 2 2 8 --global-batch-size 6 --train-iters 6
        --lr-warmup-iters 2 --weight-decay-incr-style cosine --start-weight-decay 0
        --end-weight-decay 0.3
    first: --exit-interval 3
    then:
in-samples: MOCK LLAMA --train-samples 26 --micro-batch-size 1 --rampup-batch-size 2 1 5
        --lr-decay-samples 20 --lr-warmup-samples 5 --lr-warmup-init 1e-3 --min-lr 1e-3
        --lr-decay-style cosine --log-interval 3
wsd-in-samples: MOCK LLAMA --train-samples 24 --lr-decay-style WSD --lr-wsd-decay-samples 14
        --min-lr 2e-3 --lr-wsd-decay-style minus_sqrt

# Another rate for the matrices of the vocabulary, tied and untied.
decoupled-tied: FILES GPT --decoupled-lr 3e-2 --lr-decay-style cosine --lr-warmup-iters 2
        --lr-warmup-init 1e-3 --min-lr 2e-3
decoupled-untied-resume: MOCK LLAMA --decoupled-lr 4e-3 --decoupled-min-lr 1e-3
        --lr-decay-style WSD --lr-wsd-decay-iters 3 --weight-decay 0.2
    first: --exit-interval 2
    then: --decoupled-lr 3e-2 --override-opt-param-scheduler

# Ends, and what comes after them.
resume: FILES LLAMA --attention-dropout 0.1
    first: --exit-interval 2
    then:
resume-sgd-new-schedule: FILES --optimizer sgd
    first: --exit-interval 2
    then: --lr 0.03 --lr-decay-style constant --clip-grad 0.3 --override-opt-param-scheduler
resume-new-blend: LLAMA --train-iters 7 --train-data-path 2 {data}/books 1 {data}/code
        --valid-data-path {data}/web {data}/code
    first: --exit-interval 3
    then: --train-data-path 1 {data}/web 1 {data}/books --accept-changed data
resume-old-blend: LLAMA --train-iters 8 --train-data-path {data}/books {data}/notes --eval-iters 0
    first: --exit-interval 3
    then: --train-data-path {data}/code --accept-changed data --exit-interval 5
    then: --train-data-path 1 {data}/notes 3 {data}/books --accept-changed data
resume-fp16: FP16 --loss-scale-window 2 --initial-loss-scale 1048576
    first: --exit-interval 3
    then: --exit-interval 6
    then: --no-load-optim
    narrow: fp16
finetune: FILES GPT
    first: --train-iters 2
    then: --finetune --seed 7 --save {save}/tuned
evaluate-only: FILES LLAMA --train-iters 2
    then: --skip-train --eval-iters 3
no-valid-token: GAPS --log-interval 2
three-sources: LLAMA --train-data-path {data}/notes {data}/books {data}/code --train-iters 8
        --valid-data-path {data}/web --test-data-path {data}/code {data}/notes
resume-new-batch-and-seed: FILES LLAMA --hidden-dropout 0.1
    first: --exit-interval 2
    then: --global-batch-size 6 --seed 9 --accept-changed batch seed --override-opt-param-scheduler
resume-without-moments: FILES LLAMA --lr-decay-style cosine
    first: --exit-interval 2
    then: --no-load-optim
many-epochs: LLAMA --train-data-path {data}/notes --seq-length 9 --train-iters 12
        --reset-position-ids --valid-data-path 3 {data}/counted 1 {data}/tallied
resume-between-log-lines: FILES LLAMA --log-interval 3 --eval-interval 2
    first: --exit-interval 2
    then:
bits-per-byte: LLAMA --data-path {data}/counted --split 1,1,0
offloaded: FILES LLAMA --eod-mask-loss
    on 1: --optimizer-cpu-offload --async-save --save-interval 2
frozen: FILES LLAMA --freeze embedding,layers.0 --log-num-zeros-in-grad
frozen-tied: MOCK --num-layers 3 --freeze layers.0-1 --clip-grad 0.5

# What a default would hide: shares that do not come out even, another seed, ramps of frequencies
# between their ends, a scale that overflows again when it has grown.
uneven-split-seed-llama3: --data-path {data}/books --split 5,3,3 --seed 99 LLAMA
        --hidden-dropout 0.2 --kv-channels 32 --use-rope-scaling --rope-scaling-factor 4
        --rotary-base 100 --rope-original-max-position-embeddings 64 --rope-low-freq-factor 2
        --rope-high-freq-factor 6 --lr-warmup-fraction 0.4 --lr-decay-iters 4 --min-lr 1e-3
yarn-ramp: MOCK LLAMA --kv-channels 32 --position-embedding-type yarn --rope-scaling-factor 4
        --rotary-base 100 --rope-original-max-position-embeddings 256 --yarn-beta-fast 16
        --yarn-beta-slow 2
fp16-window-of-one: FP16 --loss-scale-window 1 --initial-loss-scale 262144
    narrow: fp16

# Narrow precisions: the decisions exactly, the numbers within a bound.
fp32: FILES LLAMA
    narrow: fp32
fp32-dropout: MOCK --optimizer sgd --z-loss-coeff 1e-2
    narrow: fp32
bf16: FILES LLAMA --optimizer sgd DOCUMENTS
    narrow: bf16
bf16-adam: MOCK GPT --activation geglu
    narrow: bf16
fp16-overflows: FP16 --loss-scale-window 2 --initial-loss-scale 4194304
    narrow: fp16
fp16-hysteresis: FP16 --loss-scale-window 2 --initial-loss-scale 1048576 --hysteresis 1
        --min-loss-scale 524288 --nan-policy skip
    narrow: fp16
fp16-one-scale: FP16 --loss-scale 524288 --nan-policy skip --log-interval 3
    narrow: fp16
fp16-no-valid-token: GAPS --optimizer sgd --eval-iters 0 --initial-loss-scale 1024 --hysteresis 1
        --loss-scale-window 5
    narrow: fp16

# Layouts: the same oracle, several ranks.
tp2: FILES LLAMA --group-query-attention --num-query-groups 1 --qk-layernorm --log-params-norm
        --final-logit-softcapping 3
    on 2: TP2
tp2-sp: FILES DOCUMENTS
    on 2: SP
pp2: FILES LLAMA --z-loss-coeff 1e-2
    on 2: PP2
pp2-zero-bubble: FILES --micro-batch-size 1 --eod-mask-loss
    on 2: PP2 --pipeline-schedule zero-bubble
dp2-zero1-ramp-up: FILES LLAMA --rampup-batch-size 4 2 8 --global-batch-size 6 --eod-mask-loss
        --micro-batch-size 1
    on 2: --zero-stage 1
dp2-zero3: FILES --untie-embeddings-and-output-weights --eod-mask-loss
    on 2: --zero-stage 3
dp2-fp16: FP16 --loss-scale-window 2 --initial-loss-scale 1048576
    on 2: --zero-stage 2
    narrow: fp16
tp2-sp-then-dp2-zero3: FILES LLAMA --hidden-dropout 0.1 --train-iters 6
    first: --exit-interval 3
    then:
    on 2: SP | --zero-stage 3
tp2-sp-pp2: FILES DOCUMENTS --micro-batch-size 1
    on 4: SP PP2
tp2-sp-dp2-zero3: FILES LLAMA DOCUMENTS --hidden-dropout 0.1 --micro-batch-size 1
    on 4: SP --zero-stage 3
"""


def read_cases(table: str) -> tuple[Case, ...]:
    """The cases of a table."""
    found = []
    for name, flags, fields in read_table(table, WORDS):
        case = Case(name, flags)
        for field, text in fields:
            if field == "then":
                case = replace(case, then=(*case.then, text))
            elif field.startswith("on "):
                case = replace(case, layout=text, ranks=int(field[3:]))
            else:
                case = replace(case, **{field: text})
        found.append(case)
    return tuple(found)


NAMED = read_cases(TABLE)

# What can be mixed freely: each row of MIXED takes one value of each.
FACTORS: dict[str, tuple[str, ...]] = {
    "activation": tuple(
        f"--activation {name}" for name in ("gelu", "gelu-tanh", "swiglu", "geglu", "squared-relu")
    ),
    "norm": ("", "--normalization RMSNorm"),
    "positions": (
        "--max-position-embeddings 40",
        "--position-embedding-type none",
        "--position-embedding-type rope",
        "--position-embedding-type rope --rotary-percent 0.5 --rotary-base 300",
        "--position-embedding-type rope --rotary-seq-len-interpolation-factor 3",
        "--position-embedding-type rope --use-rope-scaling "
        "--rope-original-max-position-embeddings 16 --rotary-base 200",
        "--position-embedding-type yarn --rope-scaling-factor 4 "
        "--rope-original-max-position-embeddings 16 --rotary-base 500",
    ),
    "heads": (
        "",
        "--group-query-attention --num-query-groups 2",
        "--group-query-attention --num-query-groups 1",
    ),
    "qk norm": ("", "--qk-layernorm"),
    "biases": ("", "--disable-bias-linear", "--disable-bias-linear --add-qkv-bias"),
    "head": ("", "--untie-embeddings-and-output-weights"),
    "window": ("", "--window-size 9"),
    "attention cap": ("", "--attn-logit-softcapping 1.5"),
    "final cap": ("", "--final-logit-softcapping 2.5"),
    "z-loss": ("", "--z-loss-coeff 3e-3"),
    "attention mask": ("", "--reset-attention-mask"),
    "position ids": ("", "--reset-position-ids"),
    "loss mask": ("", "--eod-mask-loss"),
    "hidden dropout": ("--hidden-dropout 0", "--hidden-dropout 0.3"),
    "attention dropout": ("--attention-dropout 0", "--attention-dropout 0.2"),
    "data": (
        WORDS["FILES"],
        WORDS["MOCK"],
        "--data-path 3 {data}/books 2 {data}/code --split 7,2,1",
    ),
    "learning rate": (
        "--lr-decay-style constant --lr-warmup-iters 2",
        "--lr-decay-style linear --min-lr 1e-3 --lr-decay-iters 4",
        "--lr-decay-style cosine --lr-warmup-fraction 0.3 --lr-decay-iters 4",
        "--lr-decay-style inverse-square-root --lr-warmup-iters 1 --lr-warmup-init 2e-3",
        *(
            f"--lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-wsd-decay-style {style}"
            for style in ("exponential", "linear", "cosine", "minus_sqrt")
        ),
    ),
    "weight decay": (
        "",
        "--weight-decay 0.2",
        "--weight-decay-incr-style linear --start-weight-decay 0.3 --end-weight-decay 0.1",
        "--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.4",
    ),
    "optimizer": ("", "--optimizer sgd --lr 0.05"),
    "clipping": ("", "--clip-grad 0", "--clip-grad 0.3"),
    "micro-batch": ("", "--micro-batch-size 4", "--micro-batch-size 1"),
    "recompute": (
        "",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
}
MIXED_ROWS, CANDIDATES = 20, 60


def pairs_of(row: dict[str, str]) -> set[frozenset[tuple[str, str]]]:
    """The pairs of values that a row has."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


@functools.cache
def mixed_rows() -> list[dict[str, str]]:
    """Rows of one value of each factor. Each is, of some drawn at random, the one with the most
    pairs that no row before it has.
    """
    random, seen, rows = Random(1), set(), []
    for _ in range(MIXED_ROWS):
        drawn = [
            {factor: random.choice(values) for factor, values in FACTORS.items()}
            for _ in range(CANDIDATES)
        ]
        rows.append(max(drawn, key=lambda row: len(pairs_of(row) - seen)))
        seen |= pairs_of(rows[-1])
    return rows


MIXED = tuple(
    Case(f"mixed-{number}", " ".join(row.values()) + " --log-params-norm --log-num-zeros-in-grad")
    for number, row in enumerate(mixed_rows())
)
CASES = (*NAMED, *MIXED)


@functools.cache
def corpora() -> str:
    """A folder with small corpora in Megatron's format, made once a session."""
    folder = tempfile.TemporaryDirectory(prefix="oracle_")
    _KEPT.append(folder)
    kinds = (("books", 120, "<u2"), ("code", 70, "<i4"), ("web", 90, "<u2"), ("notes", 5, "<u2"))
    for number, (name, documents, dtype) in enumerate(kinds):
        random = np.random.default_rng(number)
        write_corpus(
            Path(folder.name, name), random.integers(3, 41, documents), np.dtype(dtype), random
        )
    lengths = (
        [1] * 12 + [5] * 4 + [1] * 15 + [9] * 3 + [1] * 10
    )  # stretches of nothing but ends of documents
    write_corpus(
        Path(folder.name, "gaps"), np.array(lengths), np.dtype("<u2"), np.random.default_rng(9)
    )
    for name, documents, size in (("counted", 40, 3100), ("tallied", 30, 2900)):
        own = Path(folder.name, name)
        write_corpus(own, np.full(documents, 20), np.dtype("<u2"), np.random.default_rng(size))
        write_sidecar(own, tokens=20 * documents, ends=documents, text_bytes=size)
    return folder.name


_KEPT: list[tempfile.TemporaryDirectory] = []


def write_corpus(
    prefix: Path, lengths: np.ndarray, dtype: np.dtype, random: np.random.Generator
) -> None:
    """Documents of these numbers of tokens, most of them small numbers, each closed by its end."""
    documents, lengths = len(lengths), lengths.astype("<i4")
    tokens = np.minimum(random.geometric(0.08, lengths.sum()) - 1, VOCABULARY - 2)
    tokens[np.cumsum(lengths) - 1] = VOCABULARY - 1
    tokens.astype(dtype).tofile(f"{prefix}.bin")
    ends = np.cumsum(lengths.astype("<i8"))
    header = b"MMIDIDX\0\0" + struct.pack(
        "<QBQQ", 1, {2: 8, 4: 4}[dtype.itemsize], documents, documents + 1
    )
    offsets = (np.concatenate([[0], ends[:-1]]) * dtype.itemsize).astype("<i8")
    Path(f"{prefix}.idx").write_bytes(
        header
        + lengths.tobytes()
        + offsets.tobytes()
        + np.arange(documents + 1, dtype="<i8").tobytes()
    )


def write_sidecar(prefix: Path, **counts: int) -> None:
    """What tools/preprocess_data.py writes next to a corpus, as far as it is read."""
    files = {
        kind: {"bytes": Path(f"{prefix}.{kind}").stat().st_size, "xxh3_128": "0" * 32}
        for kind in ("bin", "idx")
    }
    tokenizer = {"name": "another", "fingerprint": "0" * 32, "eod": VOCABULARY - 1}
    described = {"format": 1, "files": files, "tokenizer": tokenizer, "max_id": VOCABULARY - 1}
    described |= {"eod_count": counts.pop("ends"), **counts}
    Path(f"{prefix}.json").write_text(json.dumps(described))
