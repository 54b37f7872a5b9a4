"""Which linear layers compute with 8-bit floats, and what that asks of a run's sizes.

Called from validate.py, from model/build.py, which marks their weights, and from the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron.config.derive import RunView
from megatron.config.groups import GATED, ModelConfig, PrecisionConfig

BLOCK = 128  # consecutive elements of a row that share a scale under --fp8-recipe blockwise
# torch._scaled_mm requires sizes that are multiples of this
MULTIPLE = 16


class LinearShape(NamedTuple):
    """A linear layer of the whole model: its name in a transformer layer, outputs and inputs.
    `split`: the dimension of its weight [outputs, inputs] that tensor-parallel ranks share.
    """

    name: str
    outputs: int
    inputs: int
    split: int

    def on_rank(self, tp: int) -> tuple[int, int]:
        """Outputs and inputs that one of `ranks` tensor-parallel ranks holds."""
        sizes = [self.outputs, self.inputs]
        sizes[self.split] //= tp
        return sizes[0], sizes[1]


def linear_shapes(model: ModelConfig | RunView) -> tuple[LinearShape, ...]:
    """Those of a transformer layer."""
    h, f, d = model.hidden_size, model.ffn_hidden_size, model.kv_channels
    q = d * model.num_attention_heads
    fused = f * (2 if model.activation in GATED else 1)
    return (
        LinearShape("attention.qkv", q + 2 * d * model.num_query_groups, h, 0),
        LinearShape("attention.proj", h, q, 1),
        LinearShape("mlp.fc1", fused, h, 0),
        LinearShape("mlp.fc2", h, f, 1),
    )


def wide_linears(
    model: ModelConfig | RunView, precision: PrecisionConfig | RunView
) -> tuple[LinearShape, ...]:
    """Those that compute with 8-bit floats, in the layers that do."""
    if precision.fp8_format is None:
        return ()
    least = precision.fp8_min_width
    return tuple(each for each in linear_shapes(model) if min(each.outputs, each.inputs) >= least)


def layer_in_fp8(precision: PrecisionConfig | RunView, index: int, layers: int) -> bool:
    """Whether transformer layer `index` of `layers` computes with 8-bit floats."""
    if precision.fp8_format is None:
        return False
    if not precision.first_last_layers_bf16:
        return True
    first, last = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    return first <= index < layers - last


def fp8_faults(run: RunView) -> Iterator[str]:
    """Faults of the sizes of a run with FP8 GEMMs."""
    needed = ("hidden_size", "ffn_hidden_size", "kv_channels", "num_attention_heads")
    if run.fp8_format is not None and run.has(*needed, "num_query_groups", "num_layers"):
        for text in _faults(run):
            yield run.fault("fp8_format", text)


def _faults(run: RunView) -> Iterator[str]:
    wide, recipe = wide_linears(run, run), run.show("fp8_recipe")
    is_blockwise = run.fp8_recipe == "blockwise"
    multiple = BLOCK if is_blockwise else MULTIPLE
    if not wide:
        widest = max(min(each.outputs, each.inputs) for each in linear_shapes(run))
        yield (
            f"no linear layer has {run.fp8_min_width} inputs and outputs, the widest has {widest} "
            "of the fewer; narrow ones lose more time than they gain: drop it, or lower "
            "--fp8-min-width"
        )
    if not any(layer_in_fp8(run, index, run.num_layers) for index in range(run.num_layers)):
        yield (
            f"--first-last-layers-bf16 leaves none of --num-layers {run.num_layers}; lower "
            "--num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16"
        )
    for each in wide:
        for size, what in zip(each.on_rank(run.tp), ("outputs", "inputs"), strict=True):
            if size % multiple:
                yield (
                    f"{each.name} has {size} {what} on each tensor-parallel rank, and {recipe} "
                    f"needs a multiple of {multiple}; change --tensor-model-parallel-size or the "
                    "width"
                )
    if run.fp8_wgrad and run.fp8_recipe != "rowwise":
        yield from _tokens(run, multiple)
    if run.cp > 1 and run.fp8_wgrad and is_blockwise:
        yield (
            f"with {run.show('context_parallel_size')} blocks of tokens would hold other tokens "
            "than in one process; give --no-fp8-wgrad, or --fp8-recipe tensorwise"
        )
    if run.num_query_groups < run.tp and any(each.name == "attention.qkv" for each in wide):
        yield (
            f"with {run.show('num_query_groups')} below {run.show('tensor_model_parallel_size')} "
            "several ranks hold parts of a key's gradient, which would be rounded before they are "
            f"added up; use at most --tensor-model-parallel-size {run.num_query_groups}"
        )


def _tokens(run: RunView, multiple: int) -> Iterator[str]:
    """Weight gradients sum over tokens, those of a piece of --tiled-mlp with sequence parallelism
    gathered from the ranks.
    """
    if not run.has("seq_length", "micro_batch_size"):
        return
    pieces = max(1, run.tiled_mlp)
    tokens = run.seq_length // run.cp // pieces * run.micro_batch_size
    where = f"a piece of {run.show('tiled_mlp')}" if pieces > 1 else "a micro-batch"
    if tokens % multiple == 0 and pieces > 1 and run.sequence_parallel and multiple == BLOCK:
        tokens //= run.tp
        where += " from each rank of --sequence-parallel"
    if tokens % multiple:
        yield (
            f"{where} of {tokens} tokens is no multiple of {multiple}, which "
            f"{run.show('fp8_recipe')} needs for weight gradients; change --seq-length, "
            "--micro-batch-size or --tiled-mlp, or give --no-fp8-wgrad"
        )
