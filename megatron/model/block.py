"""The units a model is made of, and the one protocol through which they are called. s sequence, b batch, h hidden, v vocabulary.

A unit is the word embedding, one transformer layer, or the head; each owns the parameters that live and die together (a block of the
optimizer). Learned positions belong to the first layer and the final norm to the last, so embedding and head hold one matrix each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.config.groups import ModelConfig
from megatron.kernels.attention_masks import AttentionMask
from megatron.layers.attention import SelfAttention, attention_parameters
from megatron.layers.dropout import Dropout, DropoutState
from megatron.layers.embedding import Embedding, VocabularyEmbedding
from megatron.layers.linear import WeightGrad, add_weight_grads, column_linear, linear, stashing
from megatron.layers.linear_cross_entropy import linear_cross_entropy
from megatron.layers.loss import cross_entropy
from megatron.layers.mlp import MLP, mlp_parameters
from megatron.layers.norm import Norm, norm_parameters
from megatron.layers.rotary import Rotary
from megatron.layers.spec import ParameterSpec, Shard, TensorSpec, normal, parts_under, under
from megatron.layers.tensor_parallel import DENSE, TensorParallel


@dataclass(frozen=True)
class MicroBatch:
    """What every unit may read of one micro-batch; sequence first."""

    tokens: Tensor  # [s, b]
    labels: Tensor  # [s, b]
    loss_mask: Tensor  # [s, b]
    position_ids: Tensor  # [s, b]; under sequence parallelism this rank's part, as the hidden states are
    mask: AttentionMask
    rotary: Rotary | None
    dropout: DropoutState | None  # of the whole sequence; None: evaluation
    hidden_dropout: DropoutState | None  # under sequence parallelism of this rank's part


def word_matrix(config: ModelConfig, vocab_size: int, padded_vocab: int) -> ParameterSpec:
    """The word embedding [v, h], which is the head's matrix too unless they are untied."""
    ends = None if config.untie_embeddings_and_output_weights else "tied"
    shape = (vocab_size, config.hidden_size)
    return ParameterSpec((TensorSpec("embedding.word.weight", shape, normal(config), "embedding", shard=Shard(0), copies=ends,
                                     grad_sum=() if ends is None else (ends,), stored=padded_vocab),))


def head_matrix(config: ModelConfig, vocab_size: int, padded_vocab: int) -> ParameterSpec:
    """The head's matrix [v, h]; a tied one is the word embedding's."""
    if not config.untie_embeddings_and_output_weights:
        return word_matrix(config, vocab_size, padded_vocab)
    shape = (vocab_size, config.hidden_size)
    return ParameterSpec((TensorSpec("head.weight", shape, normal(config), "head", shard=Shard(0), stored=padded_vocab),))


def layer_parameters(config: ModelConfig, index: int, sequence: bool = False) -> dict[str, ParameterSpec]:
    """All parameters of a transformer layer by their names in it. The first has the table of learned positions, the last the final norm."""
    name = f"layers.{index}"

    def norm(own: str, logical: str) -> dict[str, ParameterSpec]:
        made = norm_parameters(config.normalization, config.hidden_size, logical, parts_under(sequence))
        return {f"{own}.{kind}": spec for kind, spec in made.items()}

    made = {}
    if index == 0 and config.position_embedding_type == "learned_absolute":
        shape = (config.max_position_embeddings, config.hidden_size)
        made["position.weight"] = ParameterSpec((TensorSpec("embedding.position.weight", shape, normal(config), "embedding", copies="tp",
                                                            grad_sum=parts_under(sequence)),))
    made |= norm("input_norm", f"{name}.input_norm")
    made |= {f"attention.{own}": spec for own, spec in attention_parameters(config, f"{name}.attention", sequence).items()}
    made |= norm("mlp_norm", f"{name}.mlp_norm")
    made |= {f"mlp.{own}": spec for own, spec in mlp_parameters(config, f"{name}.mlp", sequence).items()}
    if index == config.num_layers - 1:
        made |= norm("final_norm", "final_norm")
    return made


def like_layer(config: ModelConfig, index: int) -> int:
    """The first layer whose parameters are those of layer `index` but for their names: layers between the ends are alike."""
    return index if index in (0, config.num_layers - 1) else 1


def distinct_layers(config: ModelConfig) -> list[int]:
    """One layer of each kind, see `like_layer`."""
    return sorted({like_layer(config, index) for index in (0, 1, config.num_layers - 1) if index < config.num_layers})


class EmbeddingBlock(nn.Module):
    """Token ids -> [s, b, h]."""

    def __init__(self, config: ModelConfig, vocab_size: int, padded_vocab: int, tp: TensorParallel = DENSE):
        super().__init__()
        self.word = VocabularyEmbedding(word_matrix(config, vocab_size, padded_vocab), tp)

    def forward(self, _: None, micro: MicroBatch) -> Tensor:
        return self.word(micro.tokens)


class LayerBlock(nn.Module):
    """One pre-norm transformer layer, [s, b, h] -> [s, b, h] (under sequence parallelism this rank's part of s)."""

    def __init__(self, config: ModelConfig, seed: int, index: int, tp: TensorParallel = DENSE):
        super().__init__()
        parameters = layer_parameters(config, index, tp.sequence)

        def norm(name: str) -> Norm:
            return Norm(under(parameters, name), config.norm_epsilon, config.norm_backend, tp)

        def dropout(*names: object) -> Dropout:
            return Dropout(config.hidden_dropout, seed, *names, backend=config.dropout_backend)

        self.position = Embedding(parameters["position.weight"], tp) if "position.weight" in parameters else None
        self.embedding_dropout = dropout("embedding.dropout") if index == 0 else None
        self.input_norm = norm("input_norm")
        self.attention = SelfAttention(config, seed, index, tp)
        self.attention_dropout = dropout("layers", index, "attention.output_dropout")
        self.mlp_norm = norm("mlp_norm")
        self.mlp = MLP(config, f"layers.{index}.mlp", tp)
        self.mlp_dropout = dropout("layers", index, "mlp.output_dropout")
        self.final_norm = norm("final_norm") if "final_norm.weight" in parameters else None

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        if self.position is not None:
            x = x + self.position(micro.position_ids)
        if self.embedding_dropout is not None:
            x = self.embedding_dropout.hidden(x, micro.hidden_dropout)
        y, x = self.input_norm.of_sum(x)
        attended = self.attention(y, micro.rotary, micro.mask, micro.dropout)
        y, x = _add_norm(attended, self.attention_dropout, x, self.mlp_norm, micro)
        y = self.mlp(y)
        if self.final_norm is None:
            return self.mlp_dropout.add(y, x, micro.hidden_dropout)
        return _add_norm(y, self.mlp_dropout, x, self.final_norm, micro)[0]


def _add_norm(y: Tensor, dropout: Dropout, x: Tensor, norm: Norm, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """(norm of the residual stream, the stream) behind the addition of y, with dropout, to the stream x."""
    if dropout.acts(micro.hidden_dropout):
        return norm.of_sum(dropout.add(y, x, micro.hidden_dropout))
    return norm.of_sum(y, x)


class HeadBlock(nn.Module):
    """[s, b, h] -> logits -> sums of the loss over unmasked tokens, on every tensor-parallel rank. `tied`: the word embedding's weight."""

    def __init__(self, config: ModelConfig, vocab_size: int, padded_vocab: int, tied: nn.Parameter | None, tp: TensorParallel = DENSE):
        super().__init__()
        self.config, self.vocab_size, self.tp = config, vocab_size, tp
        self.weight = head_matrix(config, vocab_size, padded_vocab).parameter(tp) if tied is None else tied

    def logits(self, x: Tensor) -> Tensor:
        """[s, b, h] -> logits over the real vocabulary [s, b, v], soft-capped. One tensor-parallel rank alone."""
        assert self.tp.size == 1
        cap = self.config.final_logit_softcapping
        z = linear(x, self.weight)[..., : self.vocab_size]
        return z if cap is None else cap * torch.tanh(z / cap)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        """[2]: the objective to differentiate (with z-loss in training) and the loss to report, summed over unmasked tokens."""
        settings = self.vocab_size, self.config.final_logit_softcapping, self.tp, self.config.cross_entropy_backend
        if self.config.fused_linear_cross_entropy:
            loss, lse = linear_cross_entropy(x, self.weight, micro.labels, *settings)
        else:
            loss, lse = cross_entropy(column_linear(x, self.weight, None, self.tp), micro.labels, *settings)
        mask = micro.loss_mask.to(loss.dtype)
        reported = (loss.detach() * mask).sum()
        objective = (loss * mask).sum()
        if self.config.z_loss_coeff > 0 and micro.dropout is not None:
            objective = objective + self.config.z_loss_coeff * (lse.square() * mask).sum()
        return torch.stack([objective, reported])


Call = tuple[str, nn.Module]  # a method of BlockWrapper, and the unit it is called with


class BlockWrapper(Protocol):
    """How units are called: recomputation, sharding and offload implement it; a model and a schedule know nothing else of them.

    A unit's backward for one micro-batch is `backward`, or `backward_input` and later `backward_weight`: the same gradients, bit for bit.
    """

    def forward(self, unit: nn.Module, x: Tensor | None, micro: MicroBatch) -> tuple[Tensor, Any]:
        """The unit's output (detached) and what its backward needs."""

    def backward(self, unit: nn.Module, saved: Any, dy: Tensor) -> Tensor | None:
        """Accumulate the unit's parameter gradients; the gradient of its input (None for the embedding)."""

    def backward_input(self, unit: nn.Module, saved: Any, dy: Tensor) -> tuple[Tensor | None, Any]:
        """`backward` without the weight gradients of a unit's linear layers, and what those need: tensors of which dy may be one, so it is
        not to be written before `backward_weight`."""

    def backward_weight(self, unit: nn.Module, kept: Any) -> None:
        """Accumulate what `backward_input` left out. Called for every unit, in the order of its backward passes; `kept` is consumed."""

    def begin_step(self, calls: Sequence[Call]) -> None:
        """These calls will come now, in this order."""


@torch.no_grad()
def fold_grads(parameters: Sequence[nn.Parameter]) -> None:
    """Add what autograd accumulated in `.grad` to `main_grad`. Where a split backward pass has no main_grad yet it stays, for the second half."""
    for parameter in parameters:
        if parameter.grad is None or parameter.main_grad is None:
            continue
        if getattr(parameter, "fresh", False):
            parameter.main_grad.copy_(parameter.grad)
            parameter.fresh = False
        else:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None


@contextlib.contextmanager
def every_gradient_arrives(edge: GradientEdge, kept: Sequence[WeightGrad]) -> Iterator[None]:
    """Around a backward pass from `edge`: RuntimeError when a parameter that the graph uses was given no gradient, naming it.

    Each main_grad gets a version counter of its own for the time, which counts whatever is written to it.
    """
    parameters = _parameters_in(edge)
    for parameter in parameters:
        if parameter.main_grad is not None:
            parameter.main_grad = parameter.main_grad.data
    yield
    arrived = {id(left.weight) for left in kept}
    lost = [parameter.label for parameter in parameters if parameter.grad is None and id(parameter) not in arrived
            and not (parameter.main_grad is not None and parameter.main_grad._version)]
    if lost:
        raise RuntimeError(f"{', '.join(lost)}: used in the forward pass, but the backward pass gave no gradient: it would never be trained. Let its "
                           "autograd function return the gradient, or add it to the parameter's main_grad")


def _parameters_in(edge: GradientEdge) -> list[nn.Parameter]:
    """The parameters that a graph differentiates with respect to, each once."""
    found, seen, ahead = [], set(), [edge.node]
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), nn.Parameter):
            found.append(leaf)
        ahead += [next_node for next_node, _ in node.next_functions if next_node is not None]
    return found


class PlainBlocks:
    """The identity wrapper: each unit is an autograd graph of its own, from a detached input to its output. It saves the graph's two ends,
    (x, gradient edge of y), so that y lives no longer than whoever reads it needs; None where nothing is to be differentiated.

    Our layers add to `main_grad` themselves. What an ordinary module of PyTorch leaves in `.grad` is added to it behind the unit's backward pass.
    """

    def __init__(self) -> None:
        self.parameters: dict[nn.Module, list[nn.Parameter]] = {}  # of the units that have been differentiated

    def forward(self, unit: nn.Module, x: Tensor | None, micro: MicroBatch) -> tuple[Tensor, tuple[Tensor | None, GradientEdge] | None]:
        if x is not None:
            x = x.detach().requires_grad_(torch.is_grad_enabled())
        y = unit(x, micro)
        return y.detach(), (x, get_gradient_edge(y)) if y.requires_grad else None

    def backward(self, unit: nn.Module, saved: tuple[Tensor | None, GradientEdge] | None, dy: Tensor) -> Tensor | None:
        if saved is None:  # a frozen embedding
            return None
        return self._differentiate(unit, *saved, dy)

    def backward_input(self, unit: nn.Module, saved: tuple[Tensor | None, GradientEdge], dy: Tensor) -> tuple[Tensor | None, list[WeightGrad]]:
        with stashing(unit) as kept:
            dx = self._differentiate(unit, *saved, dy, kept)
        return dx, kept

    def backward_weight(self, unit: nn.Module, kept: list[WeightGrad]) -> None:
        add_weight_grads(kept)
        fold_grads(self.parameters[unit])

    def _differentiate(self, unit: nn.Module, x: Tensor | None, edge: GradientEdge, dy: Tensor, kept: Sequence[WeightGrad] = ()) -> Tensor | None:
        """The gradient of x; those of parameters are in their main_grad, in `kept`, or (where that is to come first) still in `.grad`."""
        first = unit not in self.parameters
        if first:
            self.parameters[unit] = list(unit.parameters())
        with every_gradient_arrives(edge, kept) if first else contextlib.nullcontext():
            torch.autograd.backward(edge, dy)
            fold_grads(self.parameters[unit])
        return None if x is None else x.grad

    def begin_step(self, calls: Sequence[Call]) -> None:
        pass
