"""The fields of a mixture of experts (MoE), which are a part of the model's group (`groups.py`),
and which layers have experts.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

from megatron.config.errors import UserError
from megatron.config.metadata import (
    BELOW_ONE,
    KERNEL,
    NOT_NEGATIVE,
    ROUNDING,
    STEPS,
    flag,
    model_flag,
)

Balancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"]
EXPERTS = "--num-experts N"
expert_flag = partial(model_flag, needs=EXPERTS)
steps_flag = partial(flag, needs=EXPERTS, change=STEPS)
MOST_LAYERS = 10_000  # of a model; a pattern has no more


@dataclass(frozen=True)
class ExpertsConfig:
    """experts"""

    num_experts: int | None = model_flag(None)
    """Experts of each mixture-of-experts (MoE) layer; a router chooses some for each token."""
    moe_ffn_hidden_size: int | None = expert_flag(None)
    """Width of an expert. Default: ffn-hidden-size."""
    moe_layer_freq: str = expert_flag("1")
    """Layers with experts: N for every N-th from the first on, or a list such as [0]*3+[1]*58."""
    moe_router_topk: int = expert_flag(2)
    """Experts that the router chooses for each token."""
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = expert_flag(
        "softmax"
    )
    """Scores of the router's logits; the chosen ones are normalized unless
    --moe-router-pre-softmax."""
    moe_router_pre_softmax: bool = expert_flag(
        False, idle_without="--moe-router-score-function softmax"
    )
    """Apply the softmax to the logits of all experts, not to those of the chosen ones."""
    moe_router_num_groups: int | None = expert_flag(None)
    """Groups of neighbouring experts; a token uses the best --moe-router-group-topk of them."""
    moe_router_group_topk: int | None = model_flag(
        None, needs=(EXPERTS, "--moe-router-num-groups N")
    )
    """Groups that a token's experts are chosen from."""
    moe_router_topk_scaling_factor: float | None = expert_flag(None)
    """Factor of the weights of the chosen experts."""
    moe_router_enable_expert_bias: bool = expert_flag(False)
    """Balance experts without a loss: a bias on the scores when experts are chosen, updated after
    each step. Needs --moe-router-score-function sigmoid or sqrtsoftplus."""
    moe_router_bias_update_rate: float = flag(
        1e-3, bound=NOT_NEGATIVE, needs=(EXPERTS, "--moe-router-enable-expert-bias"), change=STEPS
    )
    """Change of an expert's bias in a step."""
    moe_router_load_balancing_type: tuple[Balancing, ...] = steps_flag(("aux_loss",))
    """Auxiliary balancing losses: over a micro-batch (aux_loss), each sample (seq_aux_loss), or
    with the last step's shares of the global batch (global_aux_loss)."""
    moe_aux_loss_coeff: tuple[float, ...] = steps_flag((0.0,))
    """Coefficient of each of --moe-router-load-balancing-type."""
    moe_z_loss_coeff: float = steps_flag(0.0, bound=NOT_NEGATIVE)
    """Add coeff x (log sum exp of the router's logits)^2 to each token's loss."""
    moe_router_dtype: Literal["fp32", "fp64"] = flag("fp32", idle_without=EXPERTS, change=ROUNDING)
    """Precision of the router's GEMM and scores."""
    moe_router_force_load_balancing: bool = steps_flag(False)
    """Give each expert equally many tokens, whatever the scores: for speed measurements only."""
    moe_input_jitter_eps: float = steps_flag(0.0, bound=BELOW_ONE)
    """In training multiply what the router reads by random numbers between 1 - eps and 1 + eps."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = flag(
        "alltoall", idle_without=EXPERTS, change=ROUNDING
    )
    """How tokens reach their experts: alltoall, or allgather, which sends less if there are fewer
    expert-parallel ranks than experts per token."""
    moe_expert_capacity_factor: float | None = steps_flag(None)
    """Most tokens of an expert in a micro-batch, in even shares; others skip it. Default: no
    limit."""
    moe_token_drop_policy: Literal["probs", "position"] = flag(
        "probs", needs=(EXPERTS, "--moe-expert-capacity-factor N"), change=STEPS
    )
    """Tokens that an expert at capacity takes: the greatest weights, or the first ones."""
    moe_shared_expert_intermediate_size: int | None = expert_flag(None)
    """Width of an MLP for all tokens in addition to the experts (shared experts)."""
    moe_shared_expert_gate: bool = model_flag(
        False, needs=(EXPERTS, "--moe-shared-expert-intermediate-size N")
    )
    """Multiply the shared expert's output by the sigmoid of a linear layer of the token."""
    grouped_gemm_backend: Literal["auto", "triton", "grouped-mm", "torch"] = flag(
        "auto", idle_without=EXPERTS, change=KERNEL
    )
    """Kernel of the experts' GEMMs: one GEMM an expert (torch), torch's grouped GEMM, or ours in
    Triton, which also adds up weight gradients in fp32."""

    def expert_layers(self) -> tuple[bool, ...]:
        """Whether each layer has experts. Of a resolved configuration."""
        layers: int = self.num_layers  # type: ignore[attr-defined]
        if self.num_experts is None:
            return (False,) * layers
        return expert_pattern(self.moe_layer_freq, layers)


@cache  # every layer asks for it
def expert_pattern(text: str, layers: int) -> tuple[bool, ...]:
    """Whether each of `layers` layers has experts, as --moe-layer-freq specifies. Raises UserError
    with what is wrong and what would be right.
    """
    found = read_pattern(text, layers)
    if isinstance(found, int):
        return tuple(index % found == 0 for index in range(layers))
    if not any(found):
        raise UserError(f"{text!r}: no layer has experts; drop --num-experts, or give some a 1")
    return tuple(map(bool, found))


def read_pattern(text: str, layers: int) -> int | list[int]:
    """A number N, for every N-th layer, or a list with 0 or 1 for each of `layers` layers. Raises
    UserError with what is wrong and what would be right.
    """
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        raise UserError(
            f"{text!r} is neither a number nor a list of 0 and 1 such as [0]*3+[1]*58"
        ) from None
    if isinstance(found, int):
        if found < 1:
            raise UserError(f"{text!r}: give 1 or more, or a list of 0 and 1")
        return found
    if len(found) != layers:
        raise UserError(
            f"{text!r} has {len(found)} entries, and --num-layers is {layers}; make them equal"
        )
    return found


def _value(node: Any) -> int | list[int]:
    """Of a number, a list of 0 and 1, a list times a number, or a sum of lists."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        entries = [_value(entry) for entry in node.elts]
        if all(entry in (0, 1) for entry in entries):
            return entries  # type: ignore[return-value]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return _bounded(left, 1, right)
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            return _bounded(left, right, [])
        if isinstance(node.op, ast.Mult) and isinstance(left, int) and isinstance(right, list):
            return _bounded(right, left, [])
    raise ValueError


def _bounded(entries: list[int], times: int, more: Sequence[int]) -> list[int]:
    if not 0 <= len(entries) * times + len(more) <= MOST_LAYERS:
        raise ValueError
    return entries * times + list(more)
