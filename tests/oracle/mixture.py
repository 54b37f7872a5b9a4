"""A mixture of experts by its definition: every expert computes every token, and weights that are
zero leave it out.

b batch, s sequence, h hidden, E experts, k of them a token. Losses are sums over tokens; a
micro-batch is a run of --micro-batch-size samples.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Weights = dict[str, Tensor]
STATES = ("mlp.router.expert_bias", "mlp.router.expert_share")  # kept, not trained


class Routed(NamedTuple):
    """The router's output for tokens: weights [b, s, E], zero where an expert does not take the
    token; the sum of the auxiliary losses with their coefficients; tokens that chose each expert.
    """

    weights: Tensor
    objective: Tensor
    counts: Tensor


def sparse_layers(c: Namespace) -> list[bool]:
    """Which layers have experts."""
    if c.num_experts is None:
        return [False] * c.num_layers
    if c.moe_layer_freq.isdigit():
        return [i % int(c.moe_layer_freq) == 0 for i in range(c.num_layers)]
    return [word == "1" for word in c.moe_layer_freq.strip("[]").split(",")]


def best(scores: Tensor, k: int) -> Tensor:
    """1 at the k greatest of the last dimension, else 0."""
    return torch.zeros_like(scores).scatter(-1, scores.argsort(-1, descending=True)[..., :k], 1)


def scores_of(c: Namespace, logits: Tensor) -> Tensor:
    if c.moe_router_score_function == "softmax":
        return torch.softmax(logits, -1)
    if c.moe_router_score_function == "sigmoid":
        return 1 / (1 + torch.exp(-logits))
    return torch.sqrt(torch.log(1 + torch.exp(logits)))


def chosen(c: Namespace, scores: Tensor, bias: Tensor | None) -> Tensor:
    """1 where a token chooses an expert [b, s, E]."""
    wanted = scores if bias is None else scores + bias
    if c.moe_router_num_groups is not None:
        groups = wanted.unflatten(-1, (c.moe_router_num_groups, -1))
        each = c.moe_router_topk // c.moe_router_group_topk
        value = groups.sort(-1, descending=True).values[..., :each].sum(-1)
        inside = best(value, c.moe_router_group_topk)[..., None].expand_as(groups).flatten(-2)
        wanted = wanted.masked_fill(inside == 0, -math.inf)
    return best(wanted, c.moe_router_topk)


def weights_of(c: Namespace, logits: Tensor, scores: Tensor, picked: Tensor) -> Tensor:
    k = c.moe_router_topk
    if c.moe_router_score_function == "softmax" and not c.moe_router_pre_softmax:
        weights = torch.softmax(logits.masked_fill(picked == 0, -math.inf), -1)
    elif c.moe_router_score_function == "softmax" or k == 1:
        weights = scores * picked
    else:
        weights = scores * picked / (scores * picked).sum(-1, keepdim=True)
    return weights * (c.moe_router_topk_scaling_factor or 1)


def kept(c: Namespace, weights: Tensor, picked: Tensor) -> Tensor:
    """1 where an expert of limited capacity takes a token of one micro-batch [b, s, E]."""
    flat, of = picked.flatten(0, 1), weights.detach().flatten(0, 1)
    share = len(flat) * c.moe_router_topk / c.num_experts
    capacity = math.ceil(share * c.moe_expert_capacity_factor)
    keep = torch.zeros_like(flat)
    for expert in range(c.num_experts):
        tokens = flat[:, expert].nonzero()[:, 0].tolist()
        if c.moe_token_drop_policy == "probs":
            tokens.sort(key=lambda token: -float(of[token, expert]))
        keep[tokens[:capacity], expert] = 1
    return keep.view_as(picked)


def balance(c: Namespace, own: Weights, logits: Tensor, scores: Tensor) -> Tensor:
    """The losses of one micro-batch."""
    total = c.moe_z_loss_coeff * torch.logsumexp(logits, -1).square().sum()
    plain, shares = best(scores.detach(), c.moe_router_topk), scores / scores.sum(-1, keepdim=True)
    even = c.num_experts / c.moe_router_topk
    for kind, coeff in zip(c.moe_router_load_balancing_type, c.moe_aux_loss_coeff, strict=True):
        load = {
            "aux_loss": lambda: plain.mean((0, 1), keepdim=True) * even,
            "seq_aux_loss": lambda: plain.mean(1, keepdim=True) * even,
            "global_aux_loss": lambda: own["mlp.router.expert_share"] * c.num_experts,
        }[kind]()
        total = total + float(coeff) * (load * shares).sum()
    return total


def routed(c: Namespace, own: Weights, x: Tensor) -> Routed:
    """Of what the router reads [b, s, h], micro-batch by micro-batch."""
    found = []
    for part in x.split(c.micro_batch_size):
        logits = part @ own["mlp.router.weight"].T
        scores = scores_of(c, logits)
        picked = chosen(c, scores.detach(), own.get("mlp.router.expert_bias"))
        weights = weights_of(c, logits, scores, picked)
        if c.moe_expert_capacity_factor is not None:
            weights = weights * kept(c, weights, picked)
        losses = balance(c, own, logits, scores)
        found.append(Routed(weights, losses, picked.sum((0, 1))))
    weights, losses, counts = zip(*found, strict=True)
    return Routed(torch.cat(weights), sum(losses), sum(counts))


def mixture(
    c: Namespace, own: Weights, x: Tensor, jitter: Tensor, mlp: Callable[[str, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """(y [b, s, h], losses, counts); `mlp` computes one by the beginning of its weights' names. The
    router alone reads x times the jitter.
    """
    weights, losses, counts = routed(c, own, x * jitter)
    y = sum(weights[..., e, None] * mlp(f"mlp.experts.{e}", x) for e in range(c.num_experts))
    if c.moe_shared_expert_intermediate_size is not None:
        shared = mlp("mlp.shared_expert", x)
        if c.moe_shared_expert_gate:
            shared = shared * torch.sigmoid(x @ own["mlp.shared_expert_gate.weight"].T)
        y = y + shared
    return y, losses, counts


def shapes_of(c: Namespace, linear: Callable[[str, int, int], None]) -> dict[str, tuple[int, ...]]:
    """Declares the matrices of a layer with `linear`; what else is kept, by name."""
    h, f, count = c.hidden_size, c.moe_ffn_hidden_size or c.ffn_hidden_size, c.num_experts

    def mlp(name: str, width: int) -> None:
        for part in ("gate", "up") if c.gated else ("up",):
            linear(f"{name}.{part}", width, h)
        linear(f"{name}.down", h, width)

    linear("mlp.router", count, h)
    for expert in range(count):
        mlp(f"mlp.experts.{expert}", f)
    if c.moe_shared_expert_intermediate_size is not None:
        mlp("mlp.shared_expert", c.moe_shared_expert_intermediate_size)
    if c.moe_shared_expert_gate:
        linear("mlp.shared_expert_gate", 1, h)
    has = {
        STATES[0]: c.moe_router_enable_expert_bias,
        STATES[1]: "global_aux_loss" in c.moe_router_load_balancing_type,
    }
    return {name: (count,) for name, holds in has.items() if holds}


def after_step(c: Namespace, weights: Weights, layer: int, counts: Tensor) -> None:
    """What the router keeps, after a step in which experts had these numbers of tokens of the
    batch.
    """
    bias, share = (weights.get(f"layers.{layer}.{name}") for name in STATES)
    if bias is not None:
        bias += c.moe_router_bias_update_rate * torch.sign(counts.mean() - counts)
    if share is not None:
        share.copy_(counts / counts.sum())
