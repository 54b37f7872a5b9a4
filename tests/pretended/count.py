"""Kernel launches of a training step on the pretended device (device.py), counted one by one.

    python tests/pretended/count.py --out docs/results/launches.json
    python tests/pretended/count.py --out FILE --quick CASE... Llama+fault

An operator of torch that does something to tensors of the device counts as one launch; views and
allocations count as none. Of our own operators the bodies run, so that each launch of a Triton
kernel counts, and each operator of torch next to it. The second step of runs of several sizes is
counted. It is a + b layers + c micro-batches + d layers x micro-batches, with whole numbers, which
one size more than is needed for them confirms. `--quick` counts one size and gives what it finds;
`+fault` behind a case's name puts one more operator into each layer.

What torch's operators launch inside is not seen: some are several kernels (`index_put_` of the word
embedding's gradient, backward passes of attention), and a product may be two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from pretended import libraries

if __name__ == "__main__":
    libraries.load_device_guard()  # before torch is imported

import torch
from megatron.kernels.lang import CALLED, launches_to
from pretended.device import is_view, on_device
from pretended.train import (
    BF16,
    DROPOUT,
    LLAMA_BF16,
    Case,
    pretended_gpu,
    with_fault,
)
from torch.utils._python_dispatch import TorchDispatchMode

CASES = {
    "Llama": Case(LLAMA_BF16, evaluations=0),
    "Llama, ZeRO-1, 4 ranks": Case(f"{LLAMA_BF16} --zero-stage 1", 4, 4, evaluations=0),
    "GPT-2": Case(BF16, evaluations=0),
    "GPT-2, dropout 0.1": Case(DROPOUT, evaluations=0),
}
SIZES = ((3, 2), (3, 4), (5, 2), (5, 4), (7, 5))  # layers, micro-batches
QUICK = (2, 2)
COUNTED = 2  # the iteration
PARTS = ("forward", "backward", "optimizer", "rest")
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
NO_WORK = ALLOCATIONS | {"_unsafe_view", "lift_fresh", "set_", "resize_"}


class Launches(TorchDispatchMode):
    """Counts launches by the part of the step that they belong to."""

    def __init__(self) -> None:
        super().__init__()
        self.part = ""  # none: they do not count
        self.counts: Counter[str] = Counter()

    def add(self, *_: Any, **__: Any) -> None:
        """One launch."""
        if self.part:
            self.counts[self.part] += 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace == "megatron":
            with launches_to(self.add), self:
                return CALLED[function._schema.name](*args, **kwargs)
        result = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        works = name not in NO_WORK and not is_view(function)
        asks = function.namespace == "prim"  # which device a tensor is on
        if works and not asks and on_device((result, *args, *kwargs.values())):
            self.add()
        return result

    def within(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, as a part of the step."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before, self.part = self.part, part if self.part else ""
            try:
                return function(*args, **kwargs)
            finally:
                self.part = before

        return call


@contextlib.contextmanager
def parts_of_a_step(launches: Launches) -> Iterator[None]:
    """Tracks for the counter where the run is."""
    from megatron.optimizer.optimizer import Optimizer
    from megatron.parallel.pipeline import Pipeline, StepState
    from megatron.training import loop, step

    forward = launches.within("forward", Pipeline.forward)
    backward = launches.within("backward", Pipeline.backward)
    train_one = loop.train_step

    def train_step(run: Any, *rest: Any) -> Any:
        launches.part = "rest" if run.progress.iteration + 1 == COUNTED else ""
        try:
            return train_one(run, *rest)
        finally:
            launches.part = ""

    optimizer = {
        name: launches.within("optimizer", getattr(step, name))
        for name in ("all_reduce_totals", "update")
    }
    # what a pass reads is no part of it
    input_of = launches.within("rest", StepState.input_of)
    with (
        mock.patch.object(loop, "train_step", train_step),
        mock.patch.multiple(step, **optimizer),
        mock.patch.object(StepState, "input_of", input_of),
        mock.patch.multiple(Pipeline, forward=forward, backward=backward),
        # which no step does
        mock.patch.object(Optimizer, "initialise", lambda optimizer: None),
    ):
        yield


def one_more_operator(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.detach() + 1


def count(case: Case, layers: int, micro_batches: int, fault: bool) -> Launches:
    """The launches of one step, by part."""
    import pretrain_gpt

    case = case._replace(micro_batches=micro_batches, iterations=COUNTED + 1)
    launches = Launches()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(None),
        pretended_gpu(case.ranks),
        parts_of_a_step(launches),
        with_fault(one_more_operator if fault else None),
        launches,
    ):
        words = [*case.words(folder), "--num-layers", str(layers), "--log-interval", "100"]
        code = pretrain_gpt.main(words)
    assert code == 0, code
    return launches


def fit(counts: dict[tuple[int, int], int]) -> dict[str, int]:
    """The whole numbers of counts by size. Raises ValueError where there are none."""
    (few, one), (_, several), (many, _) = SIZES[:3]
    both = (counts[many, several] - counts[many, one]) - (counts[few, several] - counts[few, one])
    both //= (many - few) * (several - one)
    layer = (counts[many, one] - counts[few, one]) // (many - few) - both * one
    micro = (counts[few, several] - counts[few, one]) // (several - one) - both * few
    step = counts[few, one] - layer * few - micro * one - both * few * one
    fitted = {
        "layer and micro-batch": both,
        "micro-batch": micro,
        "layer and step": layer,
        "step": step,
    }
    if any(total(fitted, *size) != found for size, found in counts.items()):
        raise ValueError(f"launches are not linear in layers and micro-batches: {counts}")
    return fitted


def total(of: dict[str, int], layers: int, micro_batches: int) -> int:
    """The launches that the four numbers mean for one size."""
    return (
        of["step"]
        + of["layer and step"] * layers
        + of["micro-batch"] * micro_batches
        + of["layer and micro-batch"] * layers * micro_batches
    )


def measure(case: Case) -> dict[str, dict[str, int]]:
    """The four numbers of each part."""
    found = {size: count(case, *size, fault=False).counts for size in SIZES}
    return {part: fit({size: found[size][part] for size in SIZES}) for part in PARTS}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="count launches on a pretended GPU")
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} layers, micro-batches alone")
    arguments = parser.parse_args(words)
    found = {}
    for name in arguments.cases or list(CASES):
        plain, _, fault = name.partition("+")
        case = CASES[plain]
        if arguments.quick:
            found[name] = dict(count(case, *QUICK, fault=bool(fault)).counts)
        else:
            found[name] = {"flags": case.flags, "ranks": case.ranks, "launches": measure(case)}
    result = {"torch": torch.__version__, "cases": found}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
