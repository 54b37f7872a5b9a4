"""A mixture of experts in the place of a layer's MLP: a router chooses k of E experts for each
token, whose outputs are weighted and added up; in addition every token may go through a shared
expert.

The number of choices that each expert had is a sum over tokens like the loss, and comes with it to
every rank once a step. What the router has decided for a micro-batch is kept where the layer is
recomputed, so that tokens take the same way again. s sequence, b batch, h hidden, T = s b tokens of
this rank, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from megatron.config.groups import ModelConfig
from megatron.distributed.groups import ALONE, Axis
from megatron.model.dropout import DropoutState
from megatron.model.experts.dispatch import AllGather, AllToAll, DispatchPlan
from megatron.model.experts.experts import Experts, expert_parameters
from megatron.model.experts.router import (
    OBJECTIVE,
    Router,
    RouterChoice,
    loss_names,
    router_parameters,
)
from megatron.model.linear import Linear
from megatron.model.mlp import mlp_class, mlp_parameters
from megatron.model.spec import ParameterSpec, matrix, normal, parts_under
from megatron.model.tensor_parallel import NO_TP, TensorParallel

_DISPATCHERS: dict[str, Any] = {"alltoall": AllToAll, "allgather": AllGather}


class ExpertParallel(NamedTuple):
    """What a layer with experts needs to know of ranks. `grid`: those that share the matrices of an
    expert, and those that hold other experts; `samples`: those that hold other tokens of the same
    samples.
    """

    grid: TensorParallel = NO_TP
    samples: Axis = ALONE


NO_EP = ExpertParallel()


class Routing(NamedTuple):
    """Where the tokens of a micro-batch go in one layer."""

    choice: RouterChoice
    plan: DispatchPlan


def moe_parameters(
    config: ModelConfig, name: str, sequence: bool = False
) -> dict[str, ParameterSpec]:
    """Router, experts, and the shared expert with its gate [1, h] where there are any."""
    made = {
        f"router.{own}": spec
        for own, spec in router_parameters(config, f"{name}.router", sequence).items()
    }
    made |= {
        f"experts.{own}": spec for own, spec in expert_parameters(config, f"{name}.experts").items()
    }
    width = config.moe_shared_expert_intermediate_size
    if width is not None:
        # the MLP that every token goes through
        shared = mlp_parameters(config, f"{name}.shared_expert", sequence, width)
        made |= {f"shared_expert.{own}": spec for own, spec in shared.items()}
    if config.moe_shared_expert_gate:
        made["shared_expert_gate.weight"] = _shared_expert_gate(config, name, sequence)
    return made


def _shared_expert_gate(config: ModelConfig, name: str, sequence: bool) -> ParameterSpec:
    return matrix(
        f"{name}.shared_expert_gate.weight",
        (1, config.hidden_size),
        normal(config),
        copies="tp",
        grad_sum=parts_under(sequence),
    )


def expert_tokens(index: int) -> str:
    """The name of the numbers of tokens that the experts of a layer had."""
    return f"layers.{index}.expert-tokens"


class MoE(nn.Module):
    """x [s, b, h] of this rank -> [s, b, h], and in training sums alongside it."""

    # methods that RecomputeContext.wrap may replace, by the name of the module to recompute
    recomputable = {"moe": "through_experts"}

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        index: int,
        tp: TensorParallel,
        ep: ExpertParallel,
    ):
        super().__init__()
        name = f"layers.{index}.mlp"
        assert config.num_experts is not None
        self.index = index
        # metrics are means over these
        self.layers = sum(config.expert_layers())
        self.router = Router(config, seed, f"{name}.router", tp, ep.samples)
        self.experts = Experts(config, f"{name}.experts", ep.grid)
        self.dispatcher = _DISPATCHERS[config.moe_token_dispatcher_type](
            ep.grid, config.num_experts, config.grouped_gemm_backend
        )
        # A dense MLP, shared over the ranks of attention's tensor parallelism.
        width = config.moe_shared_expert_intermediate_size
        self.shared_expert = (
            None if width is None else mlp_class(config)(config, f"{name}.shared_expert", tp, width)
        )
        self.shared_expert_gate = (
            Linear(_shared_expert_gate(config, name, tp.sequence))
            if config.moe_shared_expert_gate
            else None
        )

    def forward(
        self,
        x: Tensor,
        state: DropoutState | None,
        token_index: Tensor,
        routings: dict[int, Routing],
        keeps_routing: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`state`: of training, None in evaluation; `token_index` [s]: positions of x. `routings`:
        those of the micro-batch that layers keep for their second forward pass, as this one does
        where it `keeps_routing`.
        """
        # Routing: a layer whose forward pass comes twice takes the choice of the first, so that
        # tokens go the same way again.
        logits, scores = self.router.scores(x, state)
        routing = routings.pop(self.index, None)
        if routing is None:
            choice = self.router.choose(scores, token_index, state is not None)
            routing = Routing(choice, self.dispatcher.plan(choice.experts, choice.keep))
            if keeps_routing and state is not None:
                routings[self.index] = routing
        choice, plan = routing
        # The weights are differentiated, so they are computed again from the scores.
        weights = self.router.weights(scores, choice.experts)
        # Experts: dispatch, two grouped GEMMs, combine; then the shared expert, which sees every
        # token.
        y = self.through_experts(x, weights, plan=plan).view(x.shape)
        if self.shared_expert is not None:
            y = y + self._shared(x)
        if state is None:
            return y, {}
        return y, self._sums(logits, scores, choice)

    def through_experts(self, x: Tensor, weights: Tensor, *, plan: DispatchPlan) -> Tensor:
        """x [s, b, h] and the weights of its tokens' choices [T, k] -> [T, h]."""
        rows, of_rows = self.dispatcher.rows(x.flatten(0, 1), weights, plan)
        return self.dispatcher.combine(self.experts(rows, of_rows, plan.counts), plan)

    def readers(self) -> Iterable[tuple[nn.Module, str, str | None]]:
        """As of MLP; of the experts themselves nothing is offloaded."""
        return () if self.shared_expert is None else self.shared_expert.readers()

    def _shared(self, x: Tensor) -> Tensor:
        assert self.shared_expert is not None
        y = self.shared_expert(x)
        # one gate a token (Qwen)
        return y if self.shared_expert_gate is None else y * self.shared_expert_gate(x).sigmoid()

    def _sums(self, logits: Tensor, scores: Tensor, choice: RouterChoice) -> dict[str, Tensor]:
        """Losses, metrics of which are means over the layers with experts, and the tokens of each
        expert.
        """
        losses = self.router.losses(logits, scores, choice)
        for name, value in losses.items():
            # Metrics show the mean over layers; the objective is a sum.
            if name != OBJECTIVE:
                losses[name] = value / self.layers
        return {**losses, expert_tokens(self.index): choice.counts}


def aux_outputs(config: ModelConfig, index: int) -> tuple[tuple[str, int], ...]:
    """(name, how many numbers) of what the layer gives alongside its output in training."""
    assert config.num_experts is not None
    names = loss_names(config)
    losses = (*names, OBJECTIVE) if names else ()
    return (*((name, 1) for name in losses), (expert_tokens(index), config.num_experts + 1))
