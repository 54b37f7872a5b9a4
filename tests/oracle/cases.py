"""The table of configurations in which the program is held against the oracle.

A case is a command line (BASE, then its own flags: a later one wins), the runs that follow the first in the same folder (resumes), and the
layout that the program alone is given. `{data}` stands for the folder of corpora, `{save}` for the run's own.
"""

from __future__ import annotations

import functools
import shlex
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VOCABULARY = 50  # 49 and the end of document
BASE = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 5
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --init-method-std 0.2 --lr 1e-2 --log-interval 1 --eval-interval 3 --eval-iters 2
    --save {{save}}"""
FILES = "--data-path {data}/books --split 8,1,1"
MOCK = "--mock-data"
GPT = "--hidden-dropout 0 --attention-dropout 0"
LLAMA = f"""{GPT} --activation swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights"""
DOCUMENTS = "--reset-attention-mask --reset-position-ids --eod-mask-loss"
FP64 = "--fp64"


@dataclass(frozen=True)
class Case:
    """One row. `narrow`: not float64, so numbers agree within a bound of its precision."""

    name: str
    flags: str
    then: tuple[str, ...] = ()  # flags of the runs that come after the first, on top of those of the first
    first: str = ""  # flags of the first run alone
    layout: str = ""
    ranks: int = 1
    narrow: str | None = None  # fp32, bf16, fp16

    def __str__(self) -> str:
        return self.name

    def runs(self, save: str) -> list[list[str]]:
        """The command line of each run in turn, without the layout."""
        precision = {None: FP64, "fp32": ""}.get(self.narrow, f"--{self.narrow}")
        text = f"{BASE} {self.flags} {precision}"
        lines = [f"{text} {self.first}", *(f"{text} --load {{save}} {more}" for more in self.then)]
        return [shlex.split(line.format(data=corpora(), save=save)) for line in lines]


CASES = (
    # GPT and Llama as they come, every activation, norm and kind of position.
    Case("gpt-dropout", MOCK),
    Case("gpt-files", f"{FILES} {GPT} --activation gelu-tanh --init-method-std 0.02 --lr-decay-style cosine --lr-warmup-iters 2"),
    Case("llama", f"{FILES} {LLAMA} --log-params-norm --log-num-zeros-in-grad --clip-grad 0.5"),
    Case("llama-gqa-qknorm-window", f"{FILES} {LLAMA} --group-query-attention --num-query-groups 2 --qk-layernorm --window-size 7"),
    Case("documents", f"{FILES} {DOCUMENTS} --lr-decay-style constant"),
    Case("documents-rope", f"{FILES} {LLAMA} {DOCUMENTS} --window-size 11 --hidden-dropout 0.2 --log-params-norm"),
    Case("caps-zloss", f"{MOCK} {GPT} --attn-logit-softcapping 2 --final-logit-softcapping 3 --z-loss-coeff 1e-2 --num-layers 3"),
    Case("ramp-up", f"{FILES} {LLAMA} --rampup-batch-size 2 2 6 --global-batch-size 6 --lr-decay-style WSD --lr-wsd-decay-iters 2 --eod-mask-loss"),
    Case("sgd", f"{FILES} --optimizer sgd --lr 0.1 --weight-decay 0.1 --sgd-momentum 0.8 --log-interval 2"),
    Case("resume", f"{FILES} {LLAMA} --attention-dropout 0.1", first="--exit-interval 2", then=("",)),
    Case("resume-new-blend", f"{LLAMA} --train-iters 7 --train-data-path 2 {{data}}/books 1 {{data}}/code --valid-data-path {{data}}/web "
         "{data}/code", first="--exit-interval 3", then=("--train-data-path 1 {data}/web 1 {data}/books --accept-changed data",)),
    Case("finetune", f"{FILES} {GPT}", first="--train-iters 2", then=("--finetune --seed 7 --save {save}/tuned",)),
    Case("fp16-overflows", f"{MOCK} {LLAMA} --optimizer sgd --train-iters 8 --initial-loss-scale 4194304 --loss-scale-window 2", narrow="fp16"),
    # Layouts: the same oracle, several ranks.
    Case("tp2-sp", f"{FILES} {DOCUMENTS}", layout="--tensor-model-parallel-size 2 --sequence-parallel", ranks=2),
    Case("pp2", f"{FILES} {LLAMA} --z-loss-coeff 1e-2", layout="--pipeline-model-parallel-size 2", ranks=2),
    Case("dp2-zero3", f"{FILES} --untie-embeddings-and-output-weights --eod-mask-loss", layout="--zero-stage 3", ranks=2),
)


@functools.cache
def corpora() -> str:
    """A folder with three small corpora in Megatron's format, made once a session."""
    folder = tempfile.TemporaryDirectory(prefix="oracle_")
    _KEPT.append(folder)
    for number, (name, documents, dtype) in enumerate((("books", 120, "<u2"), ("code", 70, "<i4"), ("web", 90, "<u2"))):
        write_corpus(Path(folder.name, name), documents, np.dtype(dtype), np.random.default_rng(number))
    return folder.name


_KEPT: list[tempfile.TemporaryDirectory] = []


def write_corpus(prefix: Path, documents: int, dtype: np.dtype, random: np.random.Generator) -> None:
    """Documents of 3 to 40 tokens, most of them small numbers, each closed by its end."""
    lengths = random.integers(3, 41, documents).astype("<i4")
    tokens = np.minimum(random.geometric(0.08, lengths.sum()) - 1, VOCABULARY - 2)
    tokens[np.cumsum(lengths) - 1] = VOCABULARY - 1
    tokens.astype(dtype).tofile(f"{prefix}.bin")
    ends = np.cumsum(lengths.astype("<i8"))
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, {2: 8, 4: 4}[dtype.itemsize], documents, documents + 1)
    offsets = (np.concatenate([[0], ends[:-1]]) * dtype.itemsize).astype("<i8")
    Path(f"{prefix}.idx").write_bytes(header + lengths.tobytes() + offsets.tobytes() + np.arange(documents + 1, dtype="<i8").tobytes())
