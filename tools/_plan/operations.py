"""What the passes of each unit compute, move and send on one rank, by running the real layer once
for each kind of unit (layer_run.py, operation_log.py). plan/step.py prices it for a device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from megatron.tools._plan.activations import EMBEDDING, HEAD, Shape, layer_stage, unit_work
from megatron.tools._plan.program import OURS, Program
from megatron.tools._plan.state import precisions
from megatron.tools._plan.work import Exchange, Product, UnitWork, Work

from megatron.config.groups import Config
from megatron.model.arithmetic import padded_vocab_size
from megatron.model.recompute import LayerRecompute

# Bytes that torch's operators read and write for a bf16 logit: widened, its log-probability, the
# largest one for the accuracy; zeros for the gradient, the gradient before and after the softmax,
# narrowed.
WHOLE_FORWARD = (2 + 4) + (4 + 4) + 4
WHOLE_BACKWARD = 4 + (4 + 4 + 4) + (4 + 2)


class Operations:
    """The passes of the units of a run of `program` with the kernels of `device`. `vocab_size`:
    entries of the tokenizer.
    """

    def __init__(
        self, config: Config, vocab_size: int, program: Program = OURS, device: str = "cuda"
    ):
        precision, is_fp8 = config.precision, config.precision.fp8_format is not None
        self.engine_fp8 = precision if program.transformer_engine and is_fp8 else None
        if program.fused_softmax:
            config = config.with_fields("model", attention_backend="sdpa")
        if self.engine_fp8 is not None:
            config = config.with_fields("precision", fp8_format=None)
        self.program, self.shape = program, Shape(config, vocab_size, device)
        self.tp = config.distributed.tensor_model_parallel_size
        self.tokens, self.hidden = self.shape.tokens, config.model.hidden_size
        self.vocab = padded_vocab_size(vocab_size, config.model, self.tp) // self.tp
        self.size = precisions(config)

    def like(self, index: int) -> int:
        """The layer that runs in place of layer `index`. The final norm is left out: it is less
        than a hundredth of a layer's time, and running the last layer too would double the runs.
        """
        return self.shape.like(index, final_norm=False)

    def layer(self, index: int, choice: LayerRecompute) -> UnitWork:
        """The passes of one transformer layer, with what its backward pass recomputes."""
        if choice.whole:  # wherever in its group it is
            choice = dataclasses.replace(choice, first=True, last=True)
        work = unit_work(self.shape, layer_stage(self.shape, index, final_norm=False), choice)
        if self.program.fused_softmax:
            work = work.changed(_with_scores)
        if self.program.transformer_engine:
            work = work.changed(_ring_hidden).changed(_in_chunks)
        if self.program.serial:
            work = work.changed(_serial)
        return work if self.engine_fp8 is None else work.changed(self._quantised)

    def embedding(self) -> UnitWork:
        """The passes of the word embedding."""
        return unit_work(self.shape, EMBEDDING)

    def head(self) -> UnitWork:
        """Logits and loss; the weight gradient is computed with the input's."""
        work = unit_work(self.shape, HEAD)
        return self._whole_logits(work) if self.program.whole_logits else work

    def _quantised(self, work: Work) -> Work:
        """With GEMMs in 8 bits, whose tensors are read in bf16 and written twice. Our kernels make
        more passes, so these bytes are a formula.
        """
        assert self.engine_fp8 is not None
        products, touched = [], 0.0
        for each in work.products:
            is_wgrad = each.k == self.tokens
            fp8 = not each.wide and (self.engine_fp8.fp8_wgrad or not is_wgrad)
            products.append(dataclasses.replace(each, fp8=fp8))
            touched += 0.0 if is_wgrad else 4.0 * each.m * each.k * each.count
        return dataclasses.replace(work, products=tuple(products), streams=(*work.streams, touched))

    def _whole_logits(self, work: UnitWork) -> UnitWork:
        """The head's passes of a program in which every tensor-parallel rank computes the loss of
        all logits, which it gathers and copies into their order. No layer of ours does, so these
        bytes are a formula.
        """
        logits = self.tokens * self.vocab * self.tp
        gathered = logits * self.size.compute
        exchanges: tuple[Exchange, ...] = ()
        copied = 0.0
        if self.tp > 1:  # the three sums of the loss are not sent
            sent = (each for each in work.forward.exchanges if each.operation != "all-reduce")
            exchanges = (*sent, Exchange("all-gather", "tp", gathered))
            copied = 2.0 * gathered
        forward = dataclasses.replace(
            work.forward, streams=(copied, WHOLE_FORWARD * logits), exchanges=exchanges
        )
        back = dataclasses.replace(work.backward_input, streams=(WHOLE_BACKWARD * logits,))
        return UnitWork(forward, back)


def _in_chunks(work: Work) -> Work:
    """With all collectives of tensor parallelism alongside GEMMs."""
    return _hidden(work, "products", lambda each: each.axis == "tp")


def _serial(work: Work) -> Work:
    """With no collective of tensor parallelism alongside anything."""
    return _hidden(work, "", lambda each: each.axis == "tp")


def _hidden(work: Work, hidden_by: str, chosen: Callable[[Exchange], bool]) -> Work:
    """With something alongside the chosen exchanges."""
    exchanges = (
        dataclasses.replace(each, hidden_by=hidden_by) if chosen(each) else each
        for each in work.exchanges
    )
    return dataclasses.replace(work, exchanges=tuple(exchanges))


def _ring_hidden(work: Work) -> Work:
    """With all messages of the ring alongside attention, which ours are not: the last one carries
    fp32 gradients home.
    """
    return _hidden(work, "cores", lambda each: each.operation == "message")


def _with_scores(work: Work) -> Work:
    """The work of a program whose attention computes, writes and reads all scores: two GEMMs of
    each head, four in a backward pass, and one kernel between them. No layer of ours does, so its
    bytes are a formula.
    """
    products, touched = work.products, 0.0
    for core in work.cores:
        pairs = core.length**2
        keys = Product(core.length, core.length, core.head_dim, core.heads)
        values = Product(core.length, core.head_dim, core.length, core.heads)
        products += (keys, values) * (2 if core.backward else 1)
        touched += core.heads * pairs * (16 if core.backward else 10)
    return dataclasses.replace(work, products=products, cores=(), streams=(*work.streams, touched))
