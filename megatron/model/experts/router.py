"""The router of a mixture of experts: which experts a token goes to, with what weight, and the
losses that balance them.

Scores of all experts are computed in fp32 or wider. What is chosen is a function of a token alone.
Balance is measured over tokens: all that depends on more than one token is a count of integers,
which is the same for every layout, times a sum of scores over the tokens that this rank holds, a
part of a sum over ranks like the loss. Formulas are those of Megatron-LM's router; with T tokens,
E experts, k of them a token, c_i tokens of expert i, and p_ti scores that add up to 1 over i:

    auxiliary loss    coeff E / (k T) sum_i c_i sum_t p_ti      (Fedus et al. 2021)
    z-loss            coeff sum_t (log sum_i exp l_ti)^2        (Zoph et al. 2022)
    expert bias       b_i += rate sign(mean c - c_i)            (Wang et al. 2024, DeepSeek-V3)

divided by T: by all tokens of the batch, those that --eod-mask-loss leaves out of the loss
included, since all are routed. T, c and the sums are those of a micro-batch, or of a sample; for
`global_aux_loss` the shares c_i / (k T) are those of the whole batch of the step before, since the
first backward passes of a step come before its last forward passes. Bias and shares are kept with
the weights and are in every checkpoint. s, b tokens of this rank, T = s b, h hidden.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.config.model import Balancing, ModelConfig
from megatron.distributed.collectives import all_gather, all_reduce
from megatron.kernels import philox
from megatron.model.dropout import DropoutState
from megatron.model.model_parallel import ONE_RANK, ModelParallel
from megatron.model.spec import ZEROS, Init, matrix, normal, vector, whole_on_every_rank

# by the type of auxiliary loss: what metrics call it, as Megatron-LM does
LOSS_NAMES: dict[Balancing, str] = {
    "aux_loss": "load-balancing-loss",
    "seq_aux_loss": "seq-load-balancing-loss",
    "global_aux_loss": "global-load-balancing-loss",
}
Z_LOSS = "router-z-loss"
AUX_LOSS = "router-objective"  # all of them with their coefficients, which is differentiated


class RouterChoice(NamedTuple):
    """The router's decision for the tokens of this rank, which a recomputation takes again."""

    experts: Tensor  # [T, k]
    keep: Tensor | None  # [T, k] which of them take the token; None: all do
    counts: Tensor  # [E + 1] tokens that chose each expert, and choices that were not taken
    # by type of auxiliary loss: share of the choices that each expert has, times E [b or 1, E]
    loads: dict[Balancing, Tensor]


class _RouterGemm(torch.autograd.Function):
    """x [T, h] times weight [E, h] transposed, in its own precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.dtype = weight, dtype
        return x.to(dtype) @ weight.to(dtype).t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        if ctx.needs_input_grad[1]:
            # A small GEMM in the router's precision; main_grad was cleared, so it is added to.
            weight.main_grad.add_(dy.t() @ x.to(ctx.dtype))
        return (dy @ weight.to(ctx.dtype)).to(x.dtype), None, None


def count_of(keys: Tensor, size: int) -> Tensor:
    """How many keys are equal to each of 0 to size - 1, by a sort: no device differs or waits."""
    ordered = keys.flatten().sort().values
    edges = torch.arange(size + 1, device=keys.device)
    return torch.searchsorted(ordered, edges).diff()


def first_choices(
    experts: Tensor, order: Tensor, weights: Tensor | None, capacity: int, count: int
) -> Tensor:
    """Whether each choice [n] is among the first `capacity` of its expert: those with the greatest
    weights, where these are given, and of equal ones those that come first in `order`.
    """
    # Three stable sorts, the least significant key first: order, weight, expert.
    by = order.argsort(stable=True)
    if weights is not None:
        by = by[weights[by].argsort(descending=True, stable=True)]
    by = by[experts[by].argsort(stable=True)]
    of_expert = experts[by]
    start = torch.searchsorted(of_expert, torch.arange(count, device=experts.device))
    # the place of a choice among those of its expert
    place = torch.arange(len(by), device=experts.device) - start[of_expert]
    return torch.empty_like(by, dtype=torch.bool).scatter_(0, by, place < capacity)


class Router(nn.Module):
    """x [s, b, h] -> a choice, the weights of the chosen experts [T, k], and sums for the loss."""

    def __init__(
        self, config: ModelConfig, seed: int, name: str, parallel: ModelParallel = ONE_RANK
    ):
        super().__init__()
        self.config, self.samples = config, parallel.samples
        self.key = philox.key(seed, name, "jitter")
        count = config.num_experts
        weight = matrix(
            f"{name}.weight",
            (count, config.hidden_size),
            normal(config),
            is_gemm=False,
            **whole_on_every_rank(parallel.tp),
        )
        self.weight = weight.parameter()

        def state(own: str, init: Init) -> nn.Parameter:
            """[E], kept from step to step."""
            spec = vector(f"{name}.{own}", count, init, copies="tp", group="state")
            return spec.parameter()

        has_bias = config.moe_router_enable_expert_bias
        has_share = "global_aux_loss" in config.moe_router_load_balancing_type
        self.expert_bias = state("expert_bias", ZEROS) if has_bias else None
        self.expert_share = state("expert_share", Init(value=1 / count)) if has_share else None
        self.coefficients = coefficients_of(config)

    def scores(self, x: Tensor, state: DropoutState | None) -> tuple[Tensor, Tensor]:
        """(logits, scores of all experts [T, E]) of x [s, b, h]: of a softmax router that
        normalises the chosen ones alone, the logits themselves.
        """
        dtype = torch.float64 if self.config.moe_router_dtype == "fp64" else torch.float32
        dtype = torch.promote_types(x.dtype, dtype)
        if state is not None and self.config.moe_input_jitter_eps > 0:
            # in training alone, as dropout
            x = x * self._jitter(x, state)
        # [T, E] in fp32 or fp64, whatever the layer's precision
        logits = _RouterGemm.apply(x.flatten(0, 1), self.weight, dtype)
        if self.config.moe_router_score_function == "softmax":
            return logits, logits.softmax(-1) if self.config.moe_router_pre_softmax else logits
        if self.config.moe_router_score_function == "sigmoid":
            return logits, logits.sigmoid()
        return logits, torch.nn.functional.softplus(logits).sqrt()

    def _jitter(self, x: Tensor, state: DropoutState) -> Tensor:
        """[s, b, h] of 1 - eps to 1 + eps, a function of seed, layer, sample and position."""
        eps = self.config.moe_input_jitter_eps
        # uniform in [0, 1), then scaled to [1 - eps, 1 + eps)
        noise = torch.empty(x.shape[0] * x.shape[1], x.shape[2], device=x.device)
        philox.uniform(noise, self.key, state.counters())
        return noise.mul_(2 * eps).add_(1 - eps).view(x.shape).to(x.dtype)

    @torch.no_grad()
    def choose(self, scores: Tensor, token_index: Tensor, training: bool) -> RouterChoice:
        """The experts of the tokens of samples, with scores [T, E] and positions [s]."""
        config, count = self.config, scores.shape[1]
        k = config.moe_router_topk
        biased = self.expert_bias is not None or config.moe_router_num_groups is not None
        if config.moe_router_force_load_balancing:
            # For measurements: token after token goes to the next k experts, whatever its scores.
            samples = len(scores) // len(token_index)
            first = token_index.repeat_interleave(samples).unsqueeze(1) * k
            experts = (first + torch.arange(k, device=first.device)) % count
        else:
            experts = (self._biased(scores) if biased else scores).topk(k).indices
        # Integers from here on: a recomputation takes them from the first forward pass.
        chosen = count_of(experts, count)
        keep = None
        if config.moe_expert_capacity_factor is not None:
            keep = self._within_capacity(experts, self.weights(scores, experts), token_index)
        # The counts of the metrics and of the bias are of choices, taken or not.
        dropped = chosen.new_zeros(1) if keep is None else (~keep).sum().view(1)
        loads: dict[Balancing, Tensor] = {}
        if training and self.coefficients:
            # Auxiliary losses balance the choice without the bias, as in Megatron-LM.
            plain = scores.topk(k).indices if biased else experts
            loads = self._loads(plain, len(scores) // len(token_index), count)
        return RouterChoice(experts, keep, torch.cat([chosen, dropped]), loads)

    def _biased(self, scores: Tensor) -> Tensor:
        """Scores [T, E] by which experts are chosen: with the bias, and -inf outside the best
        groups (DeepSeek-V3: by the sum of a group's best k / groups).
        """
        config = self.config
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        groups, taken = config.moe_router_num_groups, config.moe_router_group_topk
        if groups is None or taken is None:
            return scores
        # Groups are consecutive experts [T, groups, E / groups].
        of_groups = scores.unflatten(1, (groups, -1))
        best = of_groups.topk(config.moe_router_topk // taken).values.sum(-1).topk(taken).indices
        inside = torch.zeros_like(of_groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
        return of_groups.masked_fill(~inside.unsqueeze(2), float("-inf")).flatten(1)

    def weights(self, scores: Tensor, experts: Tensor) -> Tensor:
        """The weights [T, k] of chosen experts."""
        config = self.config
        chosen = scores.gather(1, experts)
        if config.moe_router_score_function == "softmax":
            weights = chosen if config.moe_router_pre_softmax else chosen.softmax(-1)
        else:
            # Sigmoid scores do not add up to 1: the chosen ones are normalized.
            total = chosen.sum(-1, keepdim=True) + 1e-20
            weights = chosen / total if config.moe_router_topk > 1 else chosen
        factor = config.moe_router_topk_scaling_factor
        return weights if factor is None else weights * factor

    def _within_capacity(self, experts: Tensor, weights: Tensor, token_index: Tensor) -> Tensor:
        """Which choices [T, k] experts take. The capacity is that of a whole micro-batch, whose
        choices are gathered from the ranks that hold its parts.
        """
        size, k, s = self.samples.size, experts.shape[1], len(token_index)
        sample = torch.arange(len(experts) // s, device=experts.device)
        # The number of each token in the micro-batch, equal in all layouts, breaks ties.
        order = (sample * s * size + token_index.unsqueeze(1)).flatten()
        order = all_gather(order, self.samples).repeat_interleave(k)
        every, weight = (
            all_gather(x.contiguous(), self.samples).flatten() for x in (experts, weights)
        )
        factor = self.config.moe_expert_capacity_factor
        count = self.config.num_experts
        capacity = math.ceil(len(every) / count * factor)
        by_probability = self.config.moe_token_drop_policy == "probs"
        # Choices of all ranks [n], and this rank's part of the answer.
        keep = first_choices(every, order, weight if by_probability else None, capacity, count)
        return keep.view(size, -1, k)[self.samples.rank]

    def _loads(self, experts: Tensor, samples: int, count: int) -> dict[Balancing, Tensor]:
        """What auxiliary losses multiply scores by, from the choice [T, k] without the bias."""
        loads: dict[Balancing, Tensor] = {}
        if self.expert_share is not None and "global_aux_loss" in self.coefficients:
            loads["global_aux_loss"] = self.expert_share.double().unsqueeze(0) * count
        if not self.coefficients.keys() - {"global_aux_loss"}:
            return loads
        sample = torch.arange(samples, device=experts.device).view(1, -1, 1)
        # Rows are position-major [s, b, k]; an expert of each sample is a separate key.
        keys = experts.view(-1, samples, experts.shape[1]) + sample * count
        counts = all_reduce(count_of(keys, samples * count), self.samples).view(samples, count)
        choices = experts.numel() * self.samples.size
        if "seq_aux_loss" in self.coefficients:
            loads["seq_aux_loss"] = counts.double() * (count * samples / choices)
        if "aux_loss" in self.coefficients:
            loads["aux_loss"] = counts.sum(0, keepdim=True).double() * (count / choices)
        return loads

    def losses(self, logits: Tensor, scores: Tensor, choice: RouterChoice) -> dict[str, Tensor]:
        """Sums over the tokens [T, E] of this rank, by the names of metrics."""
        found: dict[str, Tensor] = {}
        objective = logits.new_zeros(())
        if choice.loads:
            if self.config.moe_router_score_function != "softmax":
                # Scores that add up to 1 over the experts, whatever the router's function is.
                whole = scores / scores.sum(-1, keepdim=True)
            else:
                whole = scores if self.config.moe_router_pre_softmax else logits.softmax(-1)
        for kind, load in choice.loads.items():
            # [b or 1, E]: of each sample, or of all tokens
            sums = whole.view(-1, load.shape[0], whole.shape[1]).sum(0)
            loss = (load.to(sums.dtype) * sums).sum()
            found[LOSS_NAMES[kind]] = loss.detach()
            objective = objective + self.coefficients[kind] * loss
        if self.config.moe_z_loss_coeff > 0:
            loss = logits.logsumexp(-1).square().sum()
            found[Z_LOSS] = loss.detach()
            objective = objective + self.config.moe_z_loss_coeff * loss
        return {**found, AUX_LOSS: objective} if found else {}

    @torch.no_grad()
    def update(self, counts: Tensor, taken: Tensor) -> None:
        """After a step: `counts` [E] tokens of each expert in the whole batch (float64), `taken` 1
        where the step was, and 0 where it was skipped.
        """
        # of a frozen router nothing moves that its choice depends on
        if self.expert_bias is not None and self.weight.requires_grad:
            # sign(mean - c): an expert with fewer tokens than the mean becomes more likely
            steps = (
                (counts.mean() - counts).sign() * taken * self.config.moe_router_bias_update_rate
            )
            self.expert_bias.add_(steps.to(self.expert_bias.dtype))
        if self.expert_share is not None:
            # lerp with weight 0 keeps the share of the step before where the step was skipped
            share = counts / counts.sum().clamp(min=1)
            self.expert_share.lerp_(
                share.to(self.expert_share.dtype), taken.to(self.expert_share.dtype)
            )


def coefficients_of(config: ModelConfig) -> dict[Balancing, float]:
    """Those of the auxiliary losses that there are."""
    pairs = zip(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff)
    return {kind: coeff for kind, coeff in pairs if coeff > 0}
