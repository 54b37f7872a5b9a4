"""The arithmetic of a model and a run, without building either: parameters, FLOPs, vocabulary
padding, peaks.

`ModelConfig` is a resolved one (no None among the sizes). h hidden, f ffn width, q and
k total width of the query and of the key heads, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import Any

from megatron.config.derive import ExpertRanks
from megatron.config.groups import ModelConfig
from megatron.model.layer import layer_parameters, representative_layer, vocabulary_matrix
from megatron.model.spec import ParameterSpec


def padded_vocab_size(vocab_size: int, model: ModelConfig, tp: int = 1) -> int:
    """Rows of the vocabulary's matrices: --padded-vocab-size, or rounded up for `tp` parts."""
    if model.padded_vocab_size is not None:
        return model.padded_vocab_size
    # each rank's part is a multiple of make-vocab-size-divisible-by
    unit = model.make_vocab_size_divisible_by * tp
    return -(-vocab_size // unit) * unit


def elements(
    parameters: Iterable[ParameterSpec], tp: int = 1, experts: ExpertRanks = ExpertRanks()
) -> int:
    """Elements of these parameters on one of `tp` tensor-parallel ranks, padding included; of
    experts, on one of the ranks that divide them. A "state", such as a router's bias, counts none.
    """
    total = 0
    for spec in parameters:
        if spec.group == "expert":
            total += math.prod(spec.local_shape(experts.etp, 0, experts.ep))
        elif spec.group != "state":
            total += math.prod(spec.local_shape(tp))
    return total


def parameter_count(model: ModelConfig, vocab_size: int) -> dict[str, int]:
    """Parameters of the whole model by kind and in `total`; `vocab_size` is the real vocabulary."""
    matrix = elements([vocabulary_matrix(model, vocab_size, vocab_size)])
    experts = ("experts", "router") if any(model.expert_layers()) else ()
    kinds = "position", "attention", "mlp", *experts, "norms"
    counts = {"embedding": matrix, **dict.fromkeys(kinds, 0)}
    # once for each kind of layer: one of many experts has hundreds of parameters
    alike = Counter(representative_layer(model, index) for index in range(model.num_layers))
    for index, layers in alike.items():
        for name, spec in layer_parameters(model, index).items():
            # A shared expert and its gate go through every token, so they count as MLP.
            module, part = name.split(".")[:2]
            kind = part if part in ("experts", "router") else module
            kind = "norms" if module.endswith("norm") else kind
            counts[kind] += layers * elements([spec])
    counts["head"] = matrix if model.untie_embeddings_and_output_weights else 0
    return {**counts, "total": sum(counts.values())}


def active_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Parameters that a token goes through: all but those of experts that it did not choose."""
    counts = parameter_count(model, vocab_size)
    experts = counts.get("experts", 0)
    return counts["total"] - experts + _of_chosen(model, experts)


def _of_chosen(model: ModelConfig, experts: int) -> int:
    """What of a number for all experts of a layer is that of the experts of a token."""
    return experts * model.moe_router_topk // (model.num_experts or 1) if experts else 0


def _by_layer(model: ModelConfig, count_of_layer: Callable[[int], int]) -> list[int]:
    """`count_of_layer(index)` of each layer, computed once for each kind of layer."""
    of_kind = cache(count_of_layer)
    return [of_kind(representative_layer(model, index)) for index in range(model.num_layers)]


@lru_cache  # a search for a layout asks thousands of times
def unit_parameters(
    model: ModelConfig,
    padded_vocab: int,
    tp: int = 1,
    experts: ExpertRanks = ExpertRanks(),
    *,
    copied: bool = False,
) -> tuple[int, ...]:
    """Parameters of each unit (embedding, layers, head) on each of `tp` ranks. The first layer has
    the position table, the last the final norm; a tied head has none, or a copy of the embedding's
    matrix where it is on another rank (`copied`).
    """
    matrix = elements([vocabulary_matrix(model, padded_vocab, padded_vocab)], tp)
    layers = _by_layer(
        model, lambda index: elements(layer_parameters(model, index).values(), tp, experts)
    )
    has_head = copied or model.untie_embeddings_and_output_weights
    return (matrix, *layers, matrix if has_head else 0)


@lru_cache
def unit_flops(model: ModelConfig, seq: int, vocab: int) -> tuple[int, ...]:
    """FLOPs of each unit's forward pass per token: 2 for each element of a linear layer's weight,
    of a router's and of those of the experts that a token goes through, and (q + v) seq for the
    causal half of attention, where v is the width of all heads' values; 2 h V for the head.
    """
    layers = _by_layer(model, lambda index: _layer_flops(model, index, seq))
    return (0, *layers, 2 * model.hidden_size * vocab)


@lru_cache
def expert_elements(model: ModelConfig, index: int, experts: ExpertRanks) -> int:
    """Elements of the experts of a layer on one of the ranks that divide them."""
    layer = layer_parameters(model, index).values()
    return elements((spec for spec in layer if spec.group == "expert"), 1, experts)


def _layer_flops(model: ModelConfig, index: int, seq: int) -> int:
    # One multiply-add a token for each element of a linear layer, of chosen experts alone.
    linears = [spec for spec in layer_parameters(model, index).values() if spec.is_gemm]
    experts = elements(spec for spec in linears if spec.group == "expert")
    matrices = elements(spec for spec in linears if spec.group != "expert")
    router = model.hidden_size * (model.num_experts or 0) if experts else 0
    core = (model.kv_channels + model.value_channels) * model.num_attention_heads * seq
    return 2 * (matrices + router + _of_chosen(model, experts)) + core


def flops_per_iteration(model: ModelConfig, batch: float, seq: int, vocab: int) -> float:
    """FLOPs of forward and backward (two forward passes) over `batch` samples of `seq` tokens,
    without recomputation. The padded vocabulary gives Megatron-LM's count, the real one that for
    MFU.
    """
    # forward, dgrad, wgrad
    return 3.0 * batch * seq * sum(unit_flops(model, seq, vocab))


# Dense peaks in TFLOP/s by vendors' data sheets: pattern of the device's name, bf16 and fp16 with
# fp32 accumulation, fp32 without tensor cores. The first match counts: H100 PCIe before H100.
_PEAKS = (
    (r"\bMIG\b", None, None),  # a slice of a device: its share is not in the name
    (r"GB200", 2500, 80),
    (r"B200", 2250, 75),
    (r"B100", 1750, 60),
    (r"H200 NVL|H100 NVL", 835, 60),
    (r"(H100|H800) PCIe", 756, 51),
    (r"H200|H100|H800", 989, 67),
    (r"\bH20\b", 148, 44),
    (r"A100|A800", 312, 19.5),
    (r"\bA30\b", 165, 10.3),
    (r"\bA40\b", 149.7, 37.4),
    (r"\bA10\b", 125, 31.2),
    (r"\bA10G\b", 70, 35),
    (r"\bL40S\b", 362, 91.6),
    (r"\bL40\b", 181, 90.5),
    (r"\bL4\b", 121, 30.3),
    (r"MI300X|MI325X", 1307, 163.4),
    (r"MI250X", 191.5, 23.9),  # MI250X: one of its two dies
)


def peak_tflops(device_name: str, dtype: Any) -> float | None:
    """Dense peak in TFLOP/s for a torch dtype or its name; None if it is not known."""
    precision = str(dtype).removeprefix("torch.")
    for pattern, half, single in _PEAKS:
        if re.search(pattern, device_name):
            return {"bfloat16": half, "float16": half, "float32": single}.get(precision)
    return None
