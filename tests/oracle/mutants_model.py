"""Mutants of the model: norms, activations, positions, attention, dropout, initial values, loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from megatron.kernels import attention as attention_kernel
from megatron.kernels import philox
from oracle.mutants import Make, also, mutant
from torch import Tensor, nn

from megatron.data.loader import Source
from megatron.model import dropout, embedding, gpt, layer, linear, loss, mlp, norm
from megatron.model.attention import attention, rotary
from megatron.model.attention.attention import SelfAttention
from megatron.model.attention.rotary import RotaryTables
from megatron.model.dropout import Dropout
from megatron.model.gpt import GPTModel
from megatron.model.layer import HeadLayer, TransformerLayer
from megatron.model.norm import AddNorm, Norm
from megatron.optimizer.optimizer import Optimizer

# ---- norms


def sums_of(change: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Make:
    """AddNorm.forward whose norm and residual stream are changed."""

    def make(original):
        def forward(self, x, residual=None):
            return change(self, *original(self, x, residual))

        return forward

    return make


@mutant("norm", "a LayerNorm's variance over n - 1", "gpt-files", AddNorm, "forward")
@sums_of
def _(self, y, stream):
    n = y.shape[-1]
    return y * (1.0 if self.bias is None else math.sqrt((n - 1) / n)), stream


@mutant("norm", "an RMSNorm that takes the mean off", "llama", AddNorm, "forward")
@sums_of
def _(self, y, stream):
    centred = stream - stream.mean(-1, keepdim=True)
    return Norm.forward(self, centred), stream


@mutant("norm", "an RMSNorm's epsilon outside the root", "llama", AddNorm, "forward")
@sums_of
def _(self, y, stream):
    square = stream.square().mean(-1, keepdim=True)
    return y * (square + self.eps).sqrt() / (square.sqrt() + self.eps), stream


@mutant("norm", "a norm's epsilon ten times as large", "gpt-files", Norm, "__init__")
def _(original):
    def make(self, parameters, config, *others):
        original(self, parameters, config, *others)
        self.eps *= 10

    return make


@mutant("norm", "norms' biases not trained", "gpt-files", norm._LayerNorm, "backward")
def _(original):
    def backward(ctx, dy):
        before = ctx.bias.main_grad.clone()
        found = original(ctx, dy)
        ctx.bias.main_grad.copy_(before)
        return found

    return backward


@mutant("norm", "a residual stream that is taken behind the norm", "llama", AddNorm, "forward")
@sums_of
def _(self, y, stream):
    return y, y


@mutant("norm", "no final norm", "llama", TransformerLayer, "__init__")
def _(original):
    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.final_norm is not None:
            self.final_norm.forward = lambda y, x: (x + y, x + y)

    return init


# ---- activations


@mutant(
    "activation",
    "the exact GELU for its tanh form and the other way round",
    "gpt-files",
    mlp,
    "activation_function",
)
def _(original):
    other = {"gelu": "gelu-tanh", "gelu-tanh": "gelu"}
    return lambda kind: original(other.get(kind, kind))


@mutant("activation", "gate and up exchanged", "llama", mlp, "activation_function")
def _(original):
    return lambda kind: (
        (lambda fused: original(kind)(torch.cat(fused.chunk(2, -1)[::-1], -1)))
        if kind in mlp.GATED
        else original(kind)
    )


@mutant("activation", "the gradient of SiLU without its second term", "llama", mlp, "_GATES")
def _(original):
    def gradient(dy, gate, grad_input):
        return grad_input.copy_(dy * gate.sigmoid())

    return {**original, "swiglu": (original["swiglu"][0], gradient)}


@mutant("activation", "GEGLU by the tanh form", "mixed-2", mlp, "_GATES")
def _(original):
    aten = torch.ops.aten

    def value(gate, out):
        return aten.gelu.out(gate, approximate="tanh", out=out)

    def gradient(dy, gate, grad_input):
        return aten.gelu_backward.grad_input(dy, gate, approximate="tanh", grad_input=grad_input)

    return {**original, "geglu": (value, gradient)}


@mutant("activation", "a squared ReLU that is not squared", "mixed-5", mlp, "activation_function")
def _(original):
    return lambda kind: torch.relu if kind == "squared-relu" else original(kind)


# ---- positions


@mutant("positions", "learned positions count from 1", "gpt-files", GPTModel, "micro_batch")
def _(original):
    def micro_batch(self, tokens, labels, loss_mask, position_ids, *rest, **kwargs):
        return original(
            self, tokens, labels, loss_mask, (position_ids + 1) % tokens.shape[1], *rest, **kwargs
        )

    return micro_batch


@mutant("positions", "rotary pairs of neighbours instead of halves", "llama", rotary, "_rotate")
def _(original):
    def rotate(x, cos, sin, direction):
        width = cos.shape[-1]
        order = torch.arange(width).view(-1, 2).t().flatten()
        turned = original(x[..., order], cos, sin, direction)
        return torch.cat((turned[..., order.argsort()], x[..., width:]), -1)

    return rotate


@mutant("positions", "rotary positions turn the other way", "llama", rotary, "_rotate")
def _(original):
    return lambda x, cos, sin, direction: original(x, cos, sin, -direction)


@mutant("positions", "keys are not rotated", "llama", attention, "rotate_projection")
def _(original):
    def rotate(qkv, table):
        q, _, v = original(qkv, table)
        return q, qkv[:, :, :, -2], v

    return rotate


@mutant(
    "positions", "rotary positions count on through documents", "mixed-0", RotaryTables, "table"
)
def _(original):
    def table(self, positions):
        return original(self, torch.arange(positions.shape[0])[:, None].expand(positions.shape))

    return table


def rotary_field(**fields: Any) -> Make:
    """Rotary frequencies of a configuration with other values."""
    return lambda original: lambda config: original(dataclasses.replace(config, **fields))


for field_name, value, case in (
    ("rotary_base", 10000.0, "mixed-13"),
    ("rotary_percent", 1.0, "mixed-13"),
    ("rotary_seq_len_interpolation_factor", None, "mixed-2"),
    ("use_rope_scaling", False, "mixed-4"),
    ("rope_low_freq_factor", 1.0, "uneven-split-seed-llama3"),
    ("yarn_beta_fast", 32.0, "yarn-ramp"),
    ("yarn_beta_slow", 1.0, "yarn-ramp"),
    ("rope_high_freq_factor", 4.0, "uneven-split-seed-llama3"),
    ("rope_scaling_factor", 8.0, "uneven-split-seed-llama3"),
):
    mutant("positions", f"{field_name} ignored", case, rotary, "inverse_frequencies")(
        rotary_field(**{field_name: value})
    )


@mutant("positions", "YaRN without its temperature", "mixed-5", rotary, "inverse_frequencies")
def _(original):
    return lambda config: (original(config)[0], 1.0)


# ---- attention


@mutant(
    "attention", "scores divided by d instead of its root", "llama", attention, "attention_core"
)
def _(original):
    return lambda *qkv, scale, **kwargs: original(*qkv, scale=scale**2, **kwargs)


@mutant(
    "attention",
    "query heads spread over key heads the other way",
    "llama-gqa-qknorm-window",
    attention,
    "attention_core",
)
def _(original):
    def core(q, k, v, **kwargs):
        n, g = q.shape[2], k.shape[2]
        order = torch.arange(n).view(-1, g).t().flatten()  # heads i, i + g, ... read key head i
        return original(q[:, :, order], k, v, **kwargs)[:, :, order.argsort()]

    return core


def with_norms(change: Callable[[SelfAttention], tuple[Any, Any]]) -> Make:
    """SelfAttention.forward with other norms of queries and keys."""

    def make(original):
        def forward(self, *inputs):
            if self.q_norm is None:
                return original(self, *inputs)
            kept = self.q_norm, self.k_norm
            self.q_norm, self.k_norm = change(self)
            try:
                return original(self, *inputs)
            finally:
                self.q_norm, self.k_norm = kept

        return forward

    return make


QKNORM = "llama-gqa-qknorm-window"
mutant("attention", "keys normed by the queries' weight", QKNORM, SelfAttention, "forward")(
    with_norms(lambda a: (a.q_norm, a.q_norm))
)
mutant("attention", "keys not normed", QKNORM, SelfAttention, "forward")(
    with_norms(lambda a: (a.q_norm, nn.Identity()))
)


@mutant(
    "attention", "queries and keys normed after their rotation", QKNORM, SelfAttention, "forward"
)
def _(original):
    class RotatedNorm(nn.Module):
        def __init__(self, inner, table):
            super().__init__()
            self.inner, self.table = inner, table

        def forward(self, x):
            return self.inner(rotary.apply_rotary(x, self.table))

    def forward(self, x, table, *others):
        if self.q_norm is None:
            return original(self, x, table, *others)
        kept = self.q_norm, self.k_norm
        self.q_norm, self.k_norm = RotatedNorm(kept[0], table), RotatedNorm(kept[1], table)
        try:
            return original(self, x, None, *others)
        finally:
            self.q_norm, self.k_norm = kept

    return forward


def window(more: int) -> Make:
    """Masks of a wider window."""

    def make(original):
        def mask_of(config, length, starts, own=None):
            if config.window_size is None:
                return original(config, length, starts)
            return original(
                dataclasses.replace(config, window_size=config.window_size + more), length, starts
            )

        return mask_of

    return make


mutant("attention", "a window of one key more", QKNORM, gpt, "mask_of")(window(1))
mutant("attention", "a window of one key fewer", QKNORM, gpt, "mask_of")(window(-1))


@mutant("attention", "the cap of scores ignored", "caps-zloss", attention, "attention_core")
def _(original):
    return lambda *qkv, softcap=None, **kwargs: original(*qkv, softcap=None, **kwargs)


@mutant("attention", "scores not divided by their cap", "caps-zloss", attention, "attention_core")
def _(original):
    return lambda *qkv, scale, softcap=None, **kwargs: original(
        *qkv, scale=scale * (softcap or 1.0), softcap=softcap, **kwargs
    )


@mutant("attention", "queries see the key that follows", "llama", attention, "attention_core")
def _(original):
    def core(q, k, v, *, mask, **kwargs):
        late = torch.arange(len(q), dtype=torch.int32) + 1
        return original(q, k, v, mask=dataclasses.replace(mask, q_positions=late), **kwargs)

    return core


@mutant("attention", "the document mask ignored", "documents", gpt, "mask_of")
def _(original):
    return lambda config, length, starts, own=None: original(config, length, None)


@mutant(
    "attention", "an end of document that belongs to the next one", "documents", Source, "batch"
)
def _(original):
    def batch(self, first, count):
        out = original(self, first, count)
        if out.document_starts is None:
            return out
        at = torch.arange(out.tokens.shape[1]).expand(out.tokens.shape)
        starts = torch.where(out.tokens == self.eod, at, 0).cummax(1).values
        return dataclasses.replace(out, document_starts=starts.int())

    return batch


@mutant(
    "attention",
    "weights that dropout keeps not scaled up",
    "gpt-dropout",
    attention_kernel,
    "keep_mask",
)
def _(original):
    return lambda key, samples, heads, queries, keys, drop, *others: (
        original(key, samples, heads, queries, keys, drop, *others) * (1 - drop)
    )


@mutant("attention", "one dropout mask for all heads", "gpt-dropout", attention_kernel, "keep_mask")
def _(original):
    return lambda key, samples, heads, *others: original(key, samples, heads * 0, *others)


# ---- dropout of hidden states


def named(change: Callable[[tuple], tuple]) -> Make:
    """Dropout sites with other names, so with other random streams."""
    return lambda original: (
        lambda self, probability, seed, *names, **kwargs: original(
            self, probability, seed, *change(names), **kwargs
        )
    )


mutant("dropout", "one dropout mask for all layers", "gpt-dropout", Dropout, "__init__")(
    named(lambda names: tuple(0 if isinstance(name, int) else name for name in names))
)
mutant(
    "dropout",
    "one dropout mask for attention's and the MLP's output",
    "gpt-dropout",
    Dropout,
    "__init__",
)(
    named(
        lambda names: tuple(
            "mlp.output_dropout" if name == "attention.output_dropout" else name for name in names
        )
    )
)


@mutant("dropout", "dropout that does not heed the seed", "gpt-dropout", Dropout, "__init__")
def _(original):
    return lambda self, probability, seed, *names, **kwargs: original(
        self, probability, 0, *names, **kwargs
    )


@mutant(
    "dropout", "hidden states that dropout keeps not scaled up", "gpt-dropout", dropout, "_apply"
)
def _(original):
    return lambda x, keep, probability: x * keep


@mutant("dropout", "the residual dropped too", "gpt-dropout", Dropout, "add")
def _(original):
    return lambda self, x, residual, state: self.hidden(x + residual, state)


@mutant("dropout", "no dropout behind the embedding", "gpt-dropout", TransformerLayer, "__init__")
def _(original):
    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.embedding_dropout = None

    return init


@mutant("dropout", "what should be dropped is kept", "gpt-dropout", philox, "keep_mask")
def _(original):
    return lambda key, rows, columns, probability, **others: original(
        key, rows, columns, 1 - probability, **others
    )


def dropout_samples(change: Callable[[Tensor], Tensor]) -> Make:
    """Other sample numbers, which dropout alone reads."""

    def make(original):
        def micro_batch(self, tokens, labels, loss_mask, position_ids, sample_ids, *rest, **kwargs):
            return original(
                self, tokens, labels, loss_mask, position_ids, change(sample_ids), *rest, **kwargs
            )

        return micro_batch

    return make


mutant("dropout", "one dropout mask for all samples", "gpt-dropout", GPTModel, "micro_batch")(
    dropout_samples(lambda x: x * 0)
)
mutant(
    "dropout",
    "dropout numbers samples within the micro-batch",
    "gpt-dropout",
    GPTModel,
    "micro_batch",
)(dropout_samples(lambda x: torch.arange(len(x))))


@mutant("dropout", "one dropout mask for all positions", "gpt-dropout", gpt, "DropoutState")
def _(original):
    return lambda sample_ids, token_index: original(sample_ids, token_index * 0)


@mutant("dropout", "dropout in evaluation", "gpt-dropout", GPTModel, "micro_batch")
def _(original):
    return lambda *args, training, **kwargs: original(*args, training=True, **kwargs)


# ---- initial values, gradients of embedding and biases


@mutant("model", "biases not trained", "gpt-files", linear._Linear, "backward")
def _(original):
    def backward(ctx, dy):
        before = None if ctx.bias is None else ctx.bias.main_grad.clone()
        found = original(ctx, dy)
        if before is not None:
            ctx.bias.main_grad.copy_(before)
        return found

    return backward


@mutant(
    "model",
    "a token that comes twice counts once in the embedding's gradient",
    "llama",
    embedding,
    "accumulate_embedding_grad",
)
def _(original):
    def weight_grad(dy, ids, main_grad):
        flat, rows = ids.flatten(), dy.flatten(0, -2)
        _, first = np.unique(flat.numpy(), return_index=True)
        original(rows[first], flat[first], main_grad)

    return weight_grad


def _residual_outputs_as_large_as_all(original):
    return lambda config, residual_output=False: original(config)


mutant("model", "residual outputs begin as large as all weights", "gpt-files", attention, "normal")(
    _residual_outputs_as_large_as_all
)
also(mlp, "normal")(_residual_outputs_as_large_as_all)


def _residual_outputs_by_the_root_of_l(original):
    def normal(config, residual_output=False):
        half = dataclasses.replace(config, num_layers=config.num_layers / 2)
        return original(half, residual_output=residual_output)

    return normal


mutant(
    "model",
    "residual outputs scaled by the root of L, not of 2 L",
    "gpt-files",
    attention,
    "normal",
)(_residual_outputs_by_the_root_of_l)
also(mlp, "normal")(_residual_outputs_by_the_root_of_l)


def _usual_deviation(original):
    def normal(config, residual_output=False):
        usual = dataclasses.replace(config, init_method_std=0.02)
        return original(usual, residual_output=residual_output)

    return normal


mutant("model", "init-method-std ignored", "llama", attention, "normal")(_usual_deviation)
also(mlp, "normal")(_usual_deviation)
also(layer, "normal")(_usual_deviation)


# ---- loss


@mutant("loss", "the cap of logits ignored", "caps-zloss", layer, "cross_entropy")
def _(original):
    return lambda logits, labels, columns: original(
        logits, labels, dataclasses.replace(columns, softcap=None)
    )


@mutant(
    "loss",
    "the gradient without the derivative of the cap of logits",
    "caps-zloss",
    loss.VocabularyShard,
    "into_gradient",
)
def _(original):
    def into_gradient(self, logits, labels, lse, dloss, dlse):
        z = self.softcap * (logits[:, : self.count] / self.softcap).tanh()
        dz = (z - lse[:, None]).exp() * (dloss + dlse)[:, None]
        dz.scatter_add_(-1, labels[:, None], -dloss[:, None])
        logits[:, : self.count].copy_(dz)
        logits[:, self.count :] = 0

    return into_gradient


@mutant("loss", "padded vocabulary takes probability", "llama", layer, "cross_entropy")
def _(original):
    return lambda logits, labels, columns: original(
        logits, labels, dataclasses.replace(columns, count=logits.shape[-1])
    )


@mutant(
    "loss", "z-loss without its factor of two in the gradient", "caps-zloss", HeadLayer, "__init__"
)
def _(original):
    def init(self, config, *args):
        original(self, dataclasses.replace(config, z_loss_coeff=config.z_loss_coeff / 2), *args)

    return init


@mutant("loss", "z-loss in the reported loss", "caps-zloss", HeadLayer, "forward")
def _(original):
    def forward(self, x, micro):
        objective, _ = original(self, x, micro)
        return torch.stack([objective, objective.detach()])

    return forward


def head(
    *,
    objective_mask: bool = True,
    reported_mask: bool = True,
    z_mask: bool = True,
    own_mean: bool = False,
) -> Make:
    """HeadLayer.forward that ignores the loss mask, or divides by a micro-batch's own tokens."""

    def make(original):
        def forward(self, x, micro):
            c = self.config
            logits = layer.column_linear(x, self.weight, None, self.tp)
            found, lse = layer.cross_entropy(logits, micro.labels, self.columns)
            mask = micro.loss_mask.to(found.dtype)
            everything = torch.ones_like(mask)
            reported = (found.detach() * (mask if reported_mask else everything)).sum()
            objective = (found * (mask if objective_mask else everything)).sum()
            if c.z_loss_coeff > 0 and micro.dropout is not None:
                objective = (
                    objective
                    + c.z_loss_coeff * (lse.square() * (mask if z_mask else everything)).sum()
                )
            if own_mean:
                objective = objective * mask.numel() / mask.sum()
            return torch.stack([objective, reported])

        return forward

    return make


mutant("loss", "the loss mask ignored in the gradient", "documents", HeadLayer, "forward")(
    head(objective_mask=False)
)
mutant("loss", "the loss mask ignored in the reported loss", "documents", HeadLayer, "forward")(
    head(reported_mask=False)
)
mutant("loss", "the loss mask ignored by the z-loss", "mixed-0", HeadLayer, "forward")(
    head(z_mask=False)
)
mutant("loss", "gradients of means of micro-batches", "documents", HeadLayer, "forward")(
    head(own_mean=True)
)


@mutant("loss", "gradients divided by all tokens, masked ones too", "documents", Optimizer, "step")
def _(original):
    return lambda self, *, grad_scale, **kwargs: original(
        self, grad_scale=grad_scale * 0 + 1.0, **kwargs
    )
