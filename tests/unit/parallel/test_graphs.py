"""--cuda-graphs by a stand-in for graphs on a CPU (recorded.py): whole runs in layouts against one
process without graphs, and what would go wrong if something did not keep its place.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from unittest import mock

import pytest
import torch
from distributed.pool import RankError
from parity.compare import faults_of
from parity.layouts import Row
from parity.worker import Outcome, run_case
from torch import nn
from unit.parallel.recorded import RecordedGraph

from megatron.config.arguments import parse_arguments
from megatron.config.errors import UserError
from megatron.config.validate import resolve
from megatron.model.layer import MicroBatch, TransformerLayer
from megatron.parallel import graphs
from megatron.parallel.blocks import Block
from megatron.parallel.graphs import CudaGraph, GraphedRunner
from pretrain_gpt import main

# graphs are replayed from the second step on
ROWS = (
    Row("dp2", "gpt", steps=3),
    Row("pp2 1f1b", "dropout", steps=3),
    Row("pp2 interleaved v2 dp2", "documents-rope", steps=3),
    Row("dp2 zero1", "caps-zloss", steps=3),
    Row("pp2 1f1b dp2 zero1", "uneven", steps=3),
    Row("pp2 1f1b dp2", "gqa2-qknorm", "bf16"),
)


def at_once(self: GraphedRunner, micro: MicroBatch) -> MicroBatch:
    """A micro-batch leaves its slot while it is still in flight."""
    placed = PLACE(self, micro)
    GraphedRunner.free_slot(self, placed)
    return placed


def without_copies(self: GraphedRunner, *arguments, **options) -> None:
    """Results are where the next replay writes."""
    INIT(self, *arguments, **options)
    self.first = self.last = set()


INIT, PLACE = GraphedRunner.__init__, GraphedRunner.place
MUTANTS = {
    "gradient buffers move": (Block, "keep_grad_place", lambda self: None),
    "a micro-batch is not copied": (graphs, "copy_tensors", lambda source, target: None),
    "a result is overwritten before it is read": (GraphedRunner, "__init__", without_copies),
    "main_grad is never overwritten": (graphs, "are_overwritten", lambda weights: False),
    "a slot is given away too early": (GraphedRunner, "place", at_once),
}


def replayed(flags: tuple[str, ...], patches: tuple[str, ...], mutant: str = "") -> Outcome:
    """A run with graphs, which is seen to replay some where it has a transformer layer."""
    before = RecordedGraph.count
    change = mock.patch.object(*MUTANTS[mutant]) if mutant else contextlib.nullcontext()
    with change:
        outcome = run_case((*flags, "--cuda-graphs"), (*patches, "recorded"))
    assert RecordedGraph.count > before
    return outcome


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_replayed_passes_are_the_same_run(gloo_world, row):
    assert not faults_of(
        row, gloo_world(row.world).run(replayed, row.flags(layout=True), row.patches)
    )


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_does_not_keep_its_place_is_seen(gloo_world, mutant):
    row = Row("pp2 interleaved v2", "llama", steps=3)
    try:
        outcomes = gloo_world(2).run(replayed, row.flags(layout=True), row.patches, mutant)
    except RankError as error:
        assert "the run ended with exit code 1" in str(error)  # NaN
    else:
        assert faults_of(row, outcomes)


RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--global-batch-size 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --lr 1e-2 "
    "--train-iters 3 --eval-iters 0 --cuda-graphs"
).split()


REFUSED = """
--torch-compile
--recompute-granularity full
--zero-stage 2
--tensor-model-parallel-size 2
--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble
""".strip().splitlines()


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_be_captured_is_refused_with_the_reason(flags):
    config = parse_arguments([*RUN, *flags.split(), "--global-batch-size", "8"]).config
    refused = " ".join(flags.split()[-2:])
    words = f"--cuda-graphs: is not supported with {refused}.*(remove|set)"
    with pytest.raises(UserError, match=words):
        resolve(config, 4, None)


class Cycle:
    """Garbage that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def cuda_graph(monkeypatch) -> CudaGraph:
    """A graph whose CUDA calls do nothing. The collector is as it was after the test."""
    was_on = gc.isenabled()
    stream = contextlib.nullcontext()
    for name in ("CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, mock.Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: stream)
    monkeypatch.setattr(graphs, "capture_stream", mock.Mock())
    yield CudaGraph(None)
    (gc.enable if was_on else gc.disable)()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_on", [False, True])
def test_the_garbage_collector_is_off_in_a_capture_and_as_it_was_after(cuda_graph, is_on, fails):
    (gc.enable if is_on else gc.disable)()
    alive = []

    def work() -> None:
        garbage = weakref.ref(Cycle())
        kept = [Cycle() for _ in range(3 * gc.get_threshold()[0])]
        alive.append(garbage() is not None and bool(kept))
        if fails:
            raise ValueError

    with pytest.raises(ValueError) if fails else contextlib.nullcontext():
        cuda_graph.capture(work)
    assert alive == [True] and gc.isenabled() == is_on


def test_the_error_that_ended_a_capture_is_raised(cuda_graph):
    """An operation that is not allowed in a capture makes its end fail, too."""
    cuda_graph.graph.capture_end.side_effect = RuntimeError("due to a previous error")
    with pytest.raises(ValueError, match="the cause"):
        cuda_graph.capture(mock.Mock(side_effect=ValueError("the cause")))
    with pytest.raises(RuntimeError, match="due to a previous error"):
        cuda_graph.capture(mock.Mock())


def test_without_a_gpu_it_is_refused(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(RUN) == 2
    assert "--cuda-graphs: needs a GPU; drop the flag" in capsys.readouterr().err


class WithAnOrdinaryModule(TransformerLayer):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.adapter = nn.Linear(32, 32)

    def forward(self, x, micro):
        y = super().forward(x, micro)
        return y + self.adapter(y)


def test_a_module_that_leaves_its_gradient_to_autograd_is_refused_by_name(monkeypatch):
    from megatron.model.gpt import GPTModel

    monkeypatch.setattr(GPTModel, "layer_class", WithAnOrdinaryModule)
    with pytest.raises(UserError, match="leave their gradient to autograd: .*adapter.weight.*drop"):
        replayed((*RUN[:-1], "--position-embedding-type", "rope"), ())
