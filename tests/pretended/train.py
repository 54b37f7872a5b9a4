"""Whole runs of pretrain_gpt.py on the pretended device (device.py), one after another, or one of
tools/generate.py.

    python tests/pretended/train.py --out FILE CASE...
    python tests/pretended/train.py --out FILE short+item
    python tests/pretended/train.py --out FILE --generate CHECKPOINT

FILE gets, of each case, the exit code, how many operations each phase gave to the device, and all
that made the host wait, with the phase of the run and the line of the product. Phases:

    training    one iteration, from its first micro-batch to its last weights: loop.train_step
    loop        between iterations
    log         the lines of --log-interval
    evaluation  one source of one evaluation
    save        --save-interval, and the end of the run
    start       all before

A name behind a plus sign is of a fault that is put into the program, see FAULTS. Of several ranks
the first one runs, on torch's process group that sends nothing. The weights of --generate's
checkpoint are not read: fake tensors hold none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from pretended import libraries

if __name__ == "__main__":
    libraries.load_device_guard()  # before torch is imported

import torch
import torch.distributed as dist
from pretended.device import Log, pretended_device

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--micro-batch-size 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --lr 1e-3 "
    "--log-interval 2 --eval-interval 4"
)
ITERATIONS = 5
TOKENS = 3  # that --generate writes
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"
)
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
OPERATORS = ("norm", "rotary", "activation", "dropout", "cross-entropy", "grad-norm")
TORCH = (
    " ".join(f"--{operator}-backend torch" for operator in OPERATORS)
    + " --attention-backend sdpa --adam-implementation torch-fused"
)


class Case(NamedTuple):
    """A run: its flags in addition to MODEL, and what a test has to know of it."""

    flags: str
    ranks: int = 1
    copies: int = 1  # of the model's layers: data-parallel ranks
    micro_batches: int = 2  # of each rank and step
    iterations: int = ITERATIONS
    evaluations: int = 3  # sources: at iteration 4, at the end, and of the test split
    dynamic_scale: bool = False
    saves: bool = False
    experts: int = 0  # layers with some in which the host reads the numbers of rows

    def words(self, folder: str) -> list[str]:
        """Its command line; what it saves goes into the folder."""
        numbers = {
            "--global-batch-size": 2 * self.micro_batches * self.copies,
            "--train-iters": self.iterations,
            "--eval-iters": 2 if self.evaluations else 0,
        }
        words = [*MODEL.split(), *self.flags.split()]
        for flag, value in numbers.items():
            words += [flag, str(value)]
        return [*words, "--save", folder] if self.saves else words


BF16 = f"--bf16 {NO_DROPOUT}"
LLAMA_BF16 = f"{BF16} {LLAMA}"
DROPOUT = "--bf16 --hidden-dropout 0.1 --attention-dropout 0.1"
SHARED = "--context-parallel-size 4"
FULL = "--recompute-granularity full"
AWAY = "--activation-offload --min-offloaded-tensor-size 1024 --num-layers 4"
DOCUMENTS = "--reset-attention-mask --reset-position-ids --eod-mask-loss"
EXPERTS = (
    "--num-experts 8 --moe-ffn-hidden-size 64 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 "
    "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate --moe-input-jitter-eps 0.1"
)
# multiples of 128, as blocks want them
FP8 = (
    "--fp8-format hybrid --hidden-size 256 --ffn-hidden-size 256 --kv-channels 64 "
    "--fp8-min-width 128"
)

CASES = {
    "gpt": Case(BF16),
    "llama": Case(LLAMA_BF16),
    "short": Case(BF16, iterations=2, evaluations=0),
    "fp32": Case(NO_DROPOUT),
    "dropout": Case(DROPOUT),
    "fp16": Case(f"--fp16 {NO_DROPOUT}", dynamic_scale=True),
    "accumulation": Case(LLAMA_BF16, micro_batches=5),
    "recompute": Case(f"{DROPOUT} {LLAMA} {FULL}"),
    "offload": Case(f"{DROPOUT} {LLAMA} {AWAY}", micro_batches=3),
    "offload, zero 3": Case(
        f"{LLAMA_BF16} {AWAY} {FULL} --zero-stage 3", ranks=4, copies=4, micro_batches=3
    ),
    "yarn": Case(LLAMA_BF16.replace("rope", "yarn")),
    "fused head": Case(f"{LLAMA_BF16} --fused-linear-cross-entropy"),
    "torch": Case(f"{LLAMA_BF16} {TORCH}"),
    "gluon": Case(f"{LLAMA_BF16} --attention-backend gluon --kv-channels 64"),
    "fp8, tensors": Case(f"{LLAMA_BF16} {FP8} --fp8-recipe tensorwise"),
    "fp8, blocks": Case(f"{LLAMA_BF16} {FP8} --fp8-recipe blockwise"),
    "fp8, tensor parallel": Case(
        f"{LLAMA_BF16} {FP8} --fp8-format e4m3 --tensor-model-parallel-size 2 --sequence-parallel",
        ranks=2,
    ),
    "experts": Case(f"{LLAMA_BF16} {EXPERTS}"),
    "experts, loop": Case(f"{LLAMA_BF16} {EXPERTS} --grouped-gemm-backend torch", experts=2),
    "experts, ranks": Case(
        f"{LLAMA_BF16} {EXPERTS} --expert-model-parallel-size 2", ranks=2, copies=2, experts=2
    ),
    "experts, pairs": Case(
        f"{LLAMA_BF16} {EXPERTS} --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm",
        ranks=2,
        copies=2,
        micro_batches=3,
        experts=2,
    ),
    "any order": Case(f"{BF16} --no-deterministic-mode"),
    "save": Case(f"{LLAMA_BF16} --save-interval 4", saves=True),
    "zero 2": Case(f"{LLAMA_BF16} --zero-stage 2", ranks=4, copies=4),
    "zero 3": Case(f"{LLAMA_BF16} --zero-stage 3", ranks=4, copies=4),
    "zero 3, recompute": Case(f"{DROPOUT} {LLAMA} {FULL} --zero-stage 3", ranks=4, copies=4),
    "tensor parallel": Case(f"{LLAMA_BF16} --tensor-model-parallel-size 2", ranks=2),
    "context parallel": Case(f"{LLAMA_BF16} {SHARED} --final-logit-softcapping 30", ranks=4),
    "context parallel, heads": Case(f"{LLAMA_BF16} {SHARED} --cp-comm-type a2a", ranks=4),
    "context parallel, ring": Case(f"{LLAMA_BF16} {SHARED} --cp-comm-type p2p", ranks=4),
    "context parallel, ring, documents": Case(
        f"{DROPOUT} {LLAMA} {SHARED} {DOCUMENTS} --zero-stage 2 --cp-comm-type a2a+p2p "
        "--hierarchical-context-parallel-sizes 2 2",
        ranks=4,
    ),
    "sequence parallel": Case(
        f"{DROPOUT} {LLAMA} --tensor-model-parallel-size 2 --sequence-parallel --zero-stage 2",
        ranks=4,
        copies=2,
    ),
}


# ---- faults that a test puts in


FAULTS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda hidden: hidden.sum().item(),
    "not pinned": lambda hidden: (
        hidden + torch.ones(hidden.shape[-1]).to(hidden.device, non_blocking=True)
    ),
    "mask": lambda hidden: hidden[hidden > 0],
    "devices": lambda hidden: hidden + torch.ones(hidden.shape[-1]),
    "order": lambda hidden: hidden.detach().cumsum(0),
}


@contextlib.contextmanager
def with_fault(fault: Callable[[torch.Tensor], object] | None) -> Iterator[None]:
    """A fault at the end of each layer's forward pass, if any."""
    from megatron.model.layer import TransformerLayer

    if fault is None:
        yield
        return
    forward = TransformerLayer.forward

    def faulty(self: TransformerLayer, x: torch.Tensor, micro: Any) -> torch.Tensor:
        y = forward(self, x, micro)
        fault(y)
        return y

    with mock.patch.object(TransformerLayer, "forward", faulty):
        yield


# ---- what goes to the log


@contextlib.contextmanager
def phases(log: Log) -> Iterator[None]:
    """Tracks for the log where the run is."""
    from megatron.training import loop, pretrain

    def in_phase(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with log.within(phase):
                return function(*args, **kwargs)

        return call

    def train_step(run: Any, *rest: Any) -> Any:
        log.iteration = run.progress.iteration + 1
        with log.within("training"):
            return step(run, *rest)

    step = loop.train_step
    named = {
        "log": in_phase("log", loop.log),
        "evaluate": in_phase("evaluation", loop.evaluate),
        "save": in_phase("save", loop.save),
        "finalize": in_phase("save", loop.finalize),
        "train_step": train_step,
    }
    with mock.patch.object(pretrain, "train", in_phase("loop", loop.train)):
        with mock.patch.multiple(loop, **named):
            yield


# ---- parameters


def make_weight(block: Any, dtype: torch.dtype, device: torch.device) -> None:
    """As Block._make_weight for fake tensors: what torch itself keeps among a fake tensor's
    attributes, its device for one, is not taken over, and references of torch's own do not hinder.
    """
    block.weight = torch.zeros(block.size, dtype=dtype, device=device)
    empty = torch.empty(0, dtype=dtype, device=device)
    block.untracked = empty.set_(block.weight.untyped_storage(), 0, (block.size,), (1,))
    for entry, parameter in zip(block.entries, block.parameters, strict=True):
        stored = torch.nn.Parameter(entry.view(block.weight), requires_grad=block.trained)
        own = vars(stored)
        declared = {name: value for name, value in vars(parameter).items() if name not in own}
        own.update(declared, main_grad=None, label=entry.name)
        with mock.patch.object(torch.utils.weakref, "getweakrefs", lambda x: []):
            torch.utils.swap_tensors(parameter, stored)


@contextlib.contextmanager
def even_rows(log: Log) -> Iterator[None]:
    """All experts have as many rows: as many have to be sent as there are."""
    from megatron.model.experts.dispatch import Dispatcher

    plan = Dispatcher.plan

    def even(self: Dispatcher, experts: torch.Tensor, keep: torch.Tensor | None) -> Any:
        assert experts.numel() % self.count == 0
        log.number = experts.numel() // self.count
        try:
            return plan(self, experts, keep)
        finally:
            log.number = 0

    with mock.patch.object(Dispatcher, "plan", even):
        yield


# ---- ranks that are not there


@contextlib.contextmanager
def ranks_of(count: int) -> Iterator[None]:
    """This is the first of `count` ranks, whose collectives send nothing."""
    if count == 1:
        yield
        return
    import torch.testing._internal.distributed.fake_pg  # makes the backend known  # noqa: F401

    from megatron.distributed import groups
    from megatron.distributed.rendezvous import Launch
    from megatron.training import pretrain

    def make_groups(layout: Any, **options: Any) -> Any:
        return groups.build_groups(
            layout, 0, lambda ranks, group_desc: dist.new_group(list(ranks)), **options
        )

    def gather_objects(value: Any, axis: Any) -> list[Any]:
        return [value] * axis.size

    def broadcast_object(value: Any, axis: Any) -> Any:
        return value

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=count)
    with contextlib.ExitStack() as stack:
        named = {
            "read_launch": lambda *_: Launch(0, count, 0, 1, "torchrun"),
            "connect": lambda *_: None,
            "disconnect": lambda: None,
            "make_groups": make_groups,
        }
        stack.enter_context(mock.patch.multiple(pretrain, **named))
        for function in (gather_objects, broadcast_object):
            for name, module in list(sys.modules.items()):
                if name.startswith("megatron.") and hasattr(module, function.__name__):
                    stack.enter_context(mock.patch.object(module, function.__name__, function))
        yield
    dist.destroy_process_group()


@contextlib.contextmanager
def pretended_gpu(ranks: int = 1) -> Iterator[Log]:
    """The pretended device and what runs on it need: fake parameters, other ranks, no plan, and a
    check at start that finds nothing wrong, as there are no numbers to check.
    """
    from programs import without_plan

    from megatron.parallel.blocks import Block
    from megatron.training import prepare

    with (
        pretended_device() as log,
        ranks_of(ranks),
        mock.patch.object(Block, "_make_weight", make_weight),
        mock.patch.object(prepare, "faults", lambda variants, device: {}),
        without_plan(),
    ):
        yield log


def ended(main: Callable[[list[str]], int], words: list[str]) -> tuple[int | None, str]:
    """Exit code and error of a program."""
    try:
        return main(words), ""
    except Exception:  # a test shows it
        return None, traceback.format_exc()


def run(case_and_fault: str) -> dict[str, Any]:
    """One case: exit code or error, operations by phase, and waits."""
    import pretrain_gpt

    name, _, fault = case_and_fault.partition("+")
    case = CASES[name]
    with (
        tempfile.TemporaryDirectory() as folder,
        pretended_gpu(case.ranks) as log,
        phases(log),
        even_rows(log),
        with_fault(FAULTS.get(fault)),
    ):
        code, error = ended(pretrain_gpt.main, case.words(folder))
    return {
        "code": code,
        "error": error,
        "operations": log.operations,
        "waits": log.waits,
    }


def generate_text(folder: str) -> dict[str, Any]:
    """tools/generate.py with this checkpoint: exit code or error, and what made the host wait."""
    from megatron.tools import generate

    from megatron.checkpoint.reader import Checkpoint

    words = ["--load", folder, "--prompt", "5 6 7", "--num-tokens", str(TOKENS), "--top-k", "4"]
    with pretended_gpu() as log, mock.patch.object(Checkpoint, "read", lambda *_: None):
        code, error = ended(generate.main, words)
    return {"code": code, "error": error, "waits": [wait.what for wait in log.waits]}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="train on a pretended GPU")
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    parser.add_argument("--generate", metavar="CHECKPOINT", help="generate text instead")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(words)
    if arguments.generate:
        results = generate_text(arguments.generate)
    else:
        results = {name: run(name) for name in arguments.cases or list(CASES)}
    arguments.out.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
