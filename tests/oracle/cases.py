"""The table of configurations in which the program is held against the oracle.

A case is a command line (BASE, then its own flags: a later one wins), the runs that follow the
first in the same folder (resumes), and the layout that the program alone is given. `{data}` is
for the folder of corpora, `{save}` for the run's own.
"""

from __future__ import annotations

import functools
import json
import shlex
import struct
import tempfile
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from random import Random

import numpy as np

VOCABULARY = 50  # 49 and the end of document
BASE = f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
    --micro-batch-size 2 --global-batch-size 4
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --init-method-std 0.2 --lr 1e-2
    --log-interval 1 --eval-interval 3 --eval-iters 2 --save {{save}}
"""
FILES = "--data-path {data}/books --split 8,1,1"
MOCK = "--mock-data"
GPT = "--hidden-dropout 0 --attention-dropout 0"
LLAMA = f"""
    {GPT} --activation swiglu --normalization RMSNorm --position-embedding-type rope
    --disable-bias-linear --untie-embeddings-and-output-weights
"""
MOE = f"{LLAMA} --num-experts 8 --moe-ffn-hidden-size 24"
BIASED = """
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 4
    --moe-router-group-topk 2 --moe-router-topk 4 --moe-router-topk-scaling-factor 2.5
    --moe-router-bias-update-rate 2e-2
"""
DOCUMENTS = "--reset-attention-mask --reset-position-ids --eod-mask-loss"
FP64 = "--fp64"


@dataclass(frozen=True)
class Case:
    """One row. `narrow`: not float64, so numbers agree within a bound of its precision."""

    name: str
    flags: str
    then: tuple[
        str, ...
    ] = ()  # flags of the runs that come after the first, on top of those of the first
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
        precision = {None: FP64, "fp32": ""}.get(self.narrow, f"--{self.narrow}")
        length = "" if "--train-samples" in self.flags else "--train-iters 5"
        text = f"{BASE} {length} {self.flags} {precision}"
        lines = [f"{text} {self.first}", *(f"{text} --load {{save}} {more}" for more in self.then)]
        return [shlex.split(line.format(data=corpora(), save=save)) for line in lines]


FP16 = f"{MOCK} {LLAMA} --optimizer sgd --train-iters 8"

# Written by hand: what has a course in time, and what comes as one piece.
NAMED = (
    Case("gpt-dropout", MOCK),
    Case(
        "gpt-files",
        f"{FILES} {GPT} --activation gelu-tanh --init-method-std 0.02 --lr-decay-style cosine "
        f"--lr-warmup-iters 2",
    ),
    Case("llama", f"{FILES} {LLAMA} --log-params-norm --log-num-zeros-in-grad --clip-grad 0.5"),
    Case(
        "llama-gqa-qknorm-window",
        f"{FILES} {LLAMA} --group-query-attention --num-query-groups 2 --qk-layernorm "
        f"--window-size 7",
    ),
    Case(
        "documents", f"{FILES} {DOCUMENTS} --lr-decay-style constant --fused-linear-cross-entropy"
    ),
    Case(
        "documents-rope",
        f"{FILES} {LLAMA} {DOCUMENTS} --window-size 11 --hidden-dropout 0.2 --log-params-norm",
    ),
    Case(
        "caps-zloss",
        f"{MOCK} {GPT} --attn-logit-softcapping 2 --final-logit-softcapping 3 --z-loss-coeff "
        f"1e-2 --num-layers 3",
    ),
    Case(
        "sgd",
        f"{FILES} --optimizer sgd --lr 0.1 --weight-decay 0.1 --sgd-momentum 0.8 --log-interval 2",
    ),
    Case(
        "shapes",
        f"{MOCK} {LLAMA} --num-attention-heads 6 --kv-channels 10 --ffn-hidden-size 48 "
        f"--group-query-attention --num-query-groups 3 "
        "--qk-layernorm --norm-epsilon 1e-3 --adam-beta1 0.8 --adam-beta2 0.95 --adam-eps 1e-6 "
        "--micro-batch-size 1 --make-vocab-size-divisible-by 1",
    ),
    Case(
        "layer-kinds",
        f"{FILES} {LLAMA} --num-layers 4 --window-size 7 --window-attn-skip-freq 2 "
        f"--no-rope-freq 3 --hidden-dropout 0.2",
    ),
    Case(
        "layer-kinds-listed",
        f"{FILES} {LLAMA} {DOCUMENTS} --num-layers 4 --window-size 9 --qk-layernorm "
        f"--window-attn-skip-freq [0,1,1,0] --no-rope-freq [1,0,1,0] "
        "--recompute-granularity full",
        layout="--pipeline-model-parallel-size 2 --context-parallel-size 2",
        ranks=4,
    ),
    # Mixtures of experts: every score, loss, and way to leave tokens out.
    Case("moe", f"{MOCK} {MOE} --moe-aux-loss-coeff 3e-2 --moe-z-loss-coeff 1e-2"),
    Case(
        "moe-documents",
        f"{FILES} {MOE} {DOCUMENTS} --moe-router-load-balancing-type aux_loss seq_aux_loss "
        f"--moe-aux-loss-coeff 3e-1 2e-1 --moe-z-loss-coeff 1e-1",
        layout="--expert-model-parallel-size 2",
        ranks=2,
    ),
    Case(
        "moe-pre-softmax",
        f"{FILES} {MOE} --moe-router-pre-softmax --moe-router-topk 3 --moe-layer-freq 2 "
        f"--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 5e-2 "
        f"--moe-shared-expert-intermediate-size 24 --log-params-norm",
    ),
    Case(
        "moe-top-1",
        f"{FILES} {MOE} --moe-router-topk 1 --moe-router-pre-softmax --moe-aux-loss-coeff 1e-2 "
        f"--log-num-zeros-in-grad",
    ),
    Case(
        "moe-bias-groups",
        f"{FILES} {MOE} {BIASED} --moe-router-load-balancing-type global_aux_loss seq_aux_loss "
        f"aux_loss --moe-aux-loss-coeff 3e-2 1e-2 2e-2 --moe-shared-expert-intermediate-size 24 "
        f"--moe-shared-expert-gate --log-params-norm",
    ),
    Case(
        "moe-bias-resume",
        f"{FILES} {MOE} {BIASED} --moe-router-load-balancing-type global_aux_loss "
        f"--moe-aux-loss-coeff 5e-2 --train-iters 6",
        then=("",),
        first="--exit-interval 3",
        layout="|--expert-model-parallel-size 2",
        ranks=2,
    ),
    Case(
        "moe-sqrtsoftplus",
        f"{FILES} {MOE} --moe-router-score-function sqrtsoftplus --moe-aux-loss-coeff 2e-2 "
        f"--moe-layer-freq [0,1] --moe-router-topk-scaling-factor 1.5",
    ),
    Case(
        "moe-capacity-probs",
        f"{MOCK} {MOE} --moe-expert-capacity-factor 0.7 --moe-aux-loss-coeff 2e-2",
    ),
    Case(
        "moe-capacity-position",
        f"{FILES} {MOE} --moe-expert-capacity-factor 0.8 --moe-token-drop-policy position "
        f"--moe-router-pre-softmax",
    ),
    # Schedules in samples and in iterations, through a ramp.
    Case(
        "ramp-up",
        f"{FILES} {LLAMA} --rampup-batch-size 2 2 6 --global-batch-size 6 --lr-decay-style WSD "
        f"--lr-wsd-decay-iters 2 --eod-mask-loss",
    ),
    Case(
        "ramp-up-resume",
        f"{FILES} {LLAMA} --rampup-batch-size 2 2 8 --global-batch-size 6 --train-iters 6 "
        f"--lr-warmup-iters 2 "
        "--weight-decay-incr-style cosine --start-weight-decay 0 --end-weight-decay 0.3",
        first="--exit-interval 3",
        then=("",),
    ),
    Case(
        "in-samples",
        f"{MOCK} {LLAMA} --train-samples 26 --micro-batch-size 1 --rampup-batch-size 2 1 8 "
        f"--lr-decay-samples 20 --lr-warmup-samples 5 "
        "--lr-warmup-init 1e-3 --min-lr 1e-3 --lr-decay-style cosine --log-interval 3",
    ),
    Case(
        "wsd-in-samples",
        f"{MOCK} {LLAMA} --train-samples 24 --lr-decay-style WSD --lr-wsd-decay-samples 14 "
        f"--min-lr 2e-3 --lr-wsd-decay-style minus_sqrt",
    ),
    # Another rate for the matrices of the vocabulary, tied and untied.
    Case(
        "decoupled-tied",
        f"{FILES} {GPT} --decoupled-lr 3e-2 --lr-decay-style cosine --lr-warmup-iters 2 "
        "--lr-warmup-init 1e-3 --min-lr 2e-3",
    ),
    Case(
        "decoupled-untied-resume",
        f"{MOCK} {LLAMA} --decoupled-lr 4e-3 --decoupled-min-lr 1e-3 --lr-decay-style WSD "
        "--lr-wsd-decay-iters 3 --weight-decay 0.2",
        first="--exit-interval 2",
        then=("--decoupled-lr 3e-2 --override-opt-param-scheduler",),
    ),
    # Ends, and what comes after them.
    Case(
        "resume", f"{FILES} {LLAMA} --attention-dropout 0.1", first="--exit-interval 2", then=("",)
    ),
    Case(
        "resume-sgd-new-schedule",
        f"{FILES} --optimizer sgd",
        first="--exit-interval 2",
        then=(
            "--lr 0.03 --lr-decay-style constant --clip-grad 0.3 --override-opt-param-scheduler",
        ),
    ),
    Case(
        "resume-new-blend",
        f"{LLAMA} --train-iters 7 --train-data-path 2 {{data}}/books 1 {{data}}/code "
        f"--valid-data-path {{data}}/web {{data}}/code",
        first="--exit-interval 3",
        then=("--train-data-path 1 {data}/web 1 {data}/books --accept-changed data",),
    ),
    Case(
        "resume-old-blend",
        f"{LLAMA} --train-iters 8 --train-data-path {{data}}/books {{data}}/notes --eval-iters 0",
        first="--exit-interval 3",
        then=(
            "--train-data-path {data}/code --accept-changed data --exit-interval 5",
            "--train-data-path 1 {data}/notes 3 {data}/books --accept-changed data",
        ),
    ),
    Case(
        "resume-fp16",
        FP16 + " --loss-scale-window 2 --initial-loss-scale 1048576",
        first="--exit-interval 3",
        then=("--exit-interval 6", "--no-load-optim"),
        narrow="fp16",
    ),
    Case(
        "finetune",
        f"{FILES} {GPT}",
        first="--train-iters 2",
        then=("--finetune --seed 7 --save {save}/tuned",),
    ),
    Case(
        "evaluate-only", f"{FILES} {LLAMA} --train-iters 2", then=("--skip-train --eval-iters 3",)
    ),
    Case(
        "no-valid-token",
        f"{LLAMA} --train-data-path {{data}}/gaps --seq-length 8 --eod-mask-loss "
        f"--global-batch-size 1 --micro-batch-size 1 --train-iters 12 --log-interval 2",
    ),
    Case(
        "three-sources",
        f"{LLAMA} --train-data-path {{data}}/notes {{data}}/books {{data}}/code --train-iters 8 "
        f"--valid-data-path {{data}}/web --test-data-path {{data}}/code {{data}}/notes",
    ),
    Case(
        "resume-new-batch-and-seed",
        f"{FILES} {LLAMA} --hidden-dropout 0.1",
        first="--exit-interval 2",
        then=(
            "--global-batch-size 6 --seed 9 --accept-changed batch seed "
            "--override-opt-param-scheduler",
        ),
    ),
    Case(
        "resume-without-moments",
        f"{FILES} {LLAMA} --lr-decay-style cosine",
        first="--exit-interval 2",
        then=("--no-load-optim",),
    ),
    Case(
        "many-epochs",
        f"{LLAMA} --train-data-path {{data}}/notes --seq-length 9 --train-iters 12 "
        "--reset-position-ids --valid-data-path 3 {data}/counted 1 {data}/tallied",
    ),
    Case(
        "resume-between-log-lines",
        f"{FILES} {LLAMA} --log-interval 3 --eval-interval 2",
        first="--exit-interval 2",
        then=("",),
    ),
    Case("bits-per-byte", f"{LLAMA} --data-path {{data}}/counted --split 1,1,0"),
    Case(
        "offloaded",
        f"{FILES} {LLAMA} --eod-mask-loss",
        layout="--optimizer-cpu-offload --async-save --save-interval 2",
    ),
    Case("frozen", f"{FILES} {LLAMA} --freeze embedding,layers.0 --log-num-zeros-in-grad"),
    Case("frozen-tied", f"{MOCK} --num-layers 3 --freeze layers.0-1 --clip-grad 0.5"),
    # What a default would hide: shares that do not come out even, another seed, ramps of
    # frequencies between their ends, a scale that overflows again when it has grown.
    Case(
        "uneven-split-seed-llama3",
        f"--data-path {{data}}/books --split 5,3,3 --seed 99 {LLAMA} --hidden-dropout 0.2 "
        "--kv-channels 32 --use-rope-scaling --rope-scaling-factor 4 --rotary-base 100 "
        "--rope-original-max-position-embeddings 64 --rope-low-freq-factor 2 "
        "--rope-high-freq-factor 6 --lr-warmup-fraction 0.4 --lr-decay-iters 4 --min-lr 1e-3",
    ),
    Case(
        "yarn-ramp",
        f"{MOCK} {LLAMA} --kv-channels 32 --position-embedding-type yarn --rope-scaling-factor 4 "
        "--rotary-base 100 --rope-original-max-position-embeddings 256 --yarn-beta-fast 16 "
        "--yarn-beta-slow 2",
    ),
    Case(
        "fp16-window-of-one",
        FP16 + " --loss-scale-window 1 --initial-loss-scale 262144",
        narrow="fp16",
    ),
    # Narrow precisions: the decisions exactly, the numbers within a bound.
    Case("fp32", f"{FILES} {LLAMA}", narrow="fp32"),
    Case("fp32-dropout", f"{MOCK} --optimizer sgd --z-loss-coeff 1e-2", narrow="fp32"),
    Case("bf16", f"{FILES} {LLAMA} --optimizer sgd {DOCUMENTS}", narrow="bf16"),
    Case("bf16-adam", f"{MOCK} {GPT} --activation geglu", narrow="bf16"),
    Case(
        "fp16-overflows",
        FP16 + " --loss-scale-window 2 --initial-loss-scale 4194304",
        narrow="fp16",
    ),
    Case(
        "fp16-hysteresis",
        FP16
        + " --loss-scale-window 2 --initial-loss-scale 1048576 --hysteresis 1 --min-loss-scale "
        "524288 --nan-policy skip",
        narrow="fp16",
    ),
    Case(
        "fp16-one-scale",
        FP16 + " --loss-scale 524288 --nan-policy skip --log-interval 3",
        narrow="fp16",
    ),
    Case(
        "fp16-no-valid-token",
        f"{LLAMA} --train-data-path {{data}}/gaps --seq-length 8 --eod-mask-loss --optimizer sgd "
        "--global-batch-size 1 --micro-batch-size 1 --train-iters 12 --eval-iters 0 "
        "--initial-loss-scale 1024 --hysteresis 1 --loss-scale-window 5",
        narrow="fp16",
    ),
    # Layouts: the same oracle, several ranks.
    Case(
        "tp2",
        f"{FILES} {LLAMA} --group-query-attention --num-query-groups 1 --qk-layernorm "
        f"--final-logit-softcapping 3 --log-params-norm",
        layout="--tensor-model-parallel-size 2",
        ranks=2,
    ),
    Case(
        "tp2-sp",
        f"{FILES} {DOCUMENTS}",
        layout="--tensor-model-parallel-size 2 --sequence-parallel",
        ranks=2,
    ),
    Case(
        "pp2",
        f"{FILES} {LLAMA} --z-loss-coeff 1e-2",
        layout="--pipeline-model-parallel-size 2",
        ranks=2,
    ),
    Case(
        "pp2-zero-bubble",
        f"{FILES} --micro-batch-size 1 --eod-mask-loss",
        layout="--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
        ranks=2,
    ),
    Case(
        "dp2-zero1-ramp-up",
        f"{FILES} {LLAMA} --rampup-batch-size 4 2 8 --global-batch-size 6 --micro-batch-size 1 "
        f"--eod-mask-loss",
        layout="--zero-stage 1",
        ranks=2,
    ),
    Case(
        "dp2-zero3",
        f"{FILES} --untie-embeddings-and-output-weights --eod-mask-loss",
        layout="--zero-stage 3",
        ranks=2,
    ),
    Case(
        "dp2-fp16",
        FP16 + " --loss-scale-window 2 --initial-loss-scale 1048576",
        layout="--zero-stage 2",
        ranks=2,
        narrow="fp16",
    ),
    Case(
        "tp2-sp-then-dp2-zero3",
        f"{FILES} {LLAMA} --hidden-dropout 0.1 --train-iters 6",
        first="--exit-interval 3",
        then=("",),
        layout="--tensor-model-parallel-size 2 --sequence-parallel | --zero-stage 3",
        ranks=2,
    ),
    Case(
        "tp2-sp-pp2",
        f"{FILES} {DOCUMENTS} --micro-batch-size 1",
        ranks=4,
        layout="--tensor-model-parallel-size 2 --sequence-parallel "
        "--pipeline-model-parallel-size 2",
    ),
    Case(
        "tp2-sp-dp2-zero3",
        f"{FILES} {LLAMA} {DOCUMENTS} --hidden-dropout 0.1 --micro-batch-size 1",
        ranks=4,
        layout="--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 3",
    ),
)

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
        FILES,
        MOCK,
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
