"""A mixture of experts in the place of a layer's MLP: a router chooses k of E experts for each
token, whose outputs are weighted and added up; in addition every token may go through a shared
expert.

The number of choices that each expert had is a sum over tokens like the loss, and comes with it to
every rank once a step. What the router has decided for a micro-batch is kept where the layer is
recomputed, so that tokens take the same way again. s sequence, b batch, h hidden, T = s b tokens of
this rank, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from megatron.config.groups import ModelConfig
from megatron.model.experts.dispatch import Dispatcher, DispatchPlan
from megatron.model.experts.experts import Experts
from megatron.model.experts.router import (
    AUX_LOSS,
    LOSS_NAMES,
    Z_LOSS,
    Router,
    RouterChoice,
    coefficients_of,
)
from megatron.model.linear import Linear
from megatron.model.mlp import MLP
from megatron.model.model_parallel import ModelParallel
from megatron.model.spec import matrix, normal, whole_on_every_rank

if TYPE_CHECKING:
    from megatron.model.layer import MicroBatch


class Routing(NamedTuple):
    """Where the tokens of a micro-batch go in one layer."""

    choice: RouterChoice
    plan: DispatchPlan


def expert_tokens(index: int) -> str:
    """The name of the numbers of tokens that the experts of a layer had."""
    return f"layers.{index}.expert-tokens"


class MoE(nn.Module):
    """x [s, b, h] of this rank -> [s, b, h], and in training sums alongside it."""

    recomputable = {"moe": "through_experts"}

    def __init__(self, config: ModelConfig, seed: int, index: int, parallel: ModelParallel):
        super().__init__()
        tp, grid = parallel.tp, parallel.experts
        name = f"layers.{index}.mlp"
        self.index = index
        # metrics are means over these
        self.layers = sum(config.expert_layers())
        self.router = Router(config, seed, f"{name}.router", parallel)
        self.experts = Experts(config, f"{name}.experts", grid)
        self.dispatcher = Dispatcher(grid, config.num_experts, config.grouped_gemm_backend)
        # A dense MLP, shared over the ranks of attention's tensor parallelism.
        width = config.moe_shared_expert_intermediate_size
        self.shared_expert = (
            None if width is None else MLP(config, f"{name}.shared_expert", tp, width)
        )
        self.shared_expert_gate = None
        if config.moe_shared_expert_gate:
            weight = matrix(
                f"{name}.shared_expert_gate.weight",
                (1, config.hidden_size),
                normal(config),
                **whole_on_every_rank(tp),
            )
            self.shared_expert_gate = Linear(weight)

    def forward(
        self, x: Tensor, micro: MicroBatch, keeps_routing: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`keeps_routing`: for the second forward pass of this layer."""
        # Routing: a layer whose forward pass comes twice takes the choice of the first.
        state = micro.hidden_dropout  # None in evaluation
        logits, scores = self.router.scores(x, state)
        routing = micro.routings.pop(self.index, None)
        if routing is None:
            choice = self.router.choose(scores, micro.token_index, state is not None)
            routing = Routing(choice, self.dispatcher.plan(choice.experts, choice.keep))
            if keeps_routing and state is not None:
                micro.routings[self.index] = routing
        choice, plan = routing
        # The weights are differentiated, so they are computed again from the scores.
        weights = self.router.weights(scores, choice.experts)
        # Experts: dispatch, two grouped GEMMs, combine; then the shared expert, for every token.
        y = self.through_experts(x, weights, plan=plan).view(x.shape)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            # one gate a token (Qwen)
            gate = self.shared_expert_gate
            y = y + (shared if gate is None else shared * gate(x).sigmoid())
        if state is None:
            return y, {}
        sums = self.router.losses(logits, scores, choice)
        for name, value in sums.items():
            # Metrics show the mean over layers; the objective is a sum.
            if name != AUX_LOSS:
                sums[name] = value / self.layers
        return y, {**sums, expert_tokens(self.index): choice.counts}

    def through_experts(self, x: Tensor, weights: Tensor, *, plan: DispatchPlan) -> Tensor:
        """x [s, b, h] and the weights of its tokens' choices [T, k] -> [T, h]."""
        rows, of_rows = self.dispatcher.rows(x.flatten(0, 1), weights, plan)
        return self.dispatcher.combine(self.experts(rows, of_rows, plan.counts), plan)


def aux_outputs(config: ModelConfig, index: int) -> tuple[tuple[str, int], ...]:
    """(name, how many numbers) of what the layer gives alongside its output in training."""
    names = [LOSS_NAMES[kind] for kind in coefficients_of(config)]
    if config.moe_z_loss_coeff > 0:
        names.append(Z_LOSS)
    losses = [*names, AUX_LOSS] if names else []
    return (*((name, 1) for name in losses), (expert_tokens(index), config.num_experts + 1))
