"""The check at start compiles what each rank of a layout launches: on tensors without memory, so
that nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from megatron.kernels import cases, lang
from megatron.kernels.attention import flash_attention
from megatron.kernels.attention_masks import attention_mask
from megatron.kernels.dispatch import Choice
from megatron.kernels.fp8 import find_maxima, quantise
from megatron.kernels.grouped_gemm import grouped_gemm, grouped_weight_grad_
from megatron.kernels.tools.shipped import compiled_from

from megatron.config.arguments import parse_arguments
from megatron.config.derive import attention_ranks
from megatron.config.fp8 import wide_linears
from megatron.config.groups import Config
from megatron.config.layers import layer_records
from megatron.config.validate import resolve
from megatron.distributed.groups import ALONE, Axis
from megatron.model import fp8
from megatron.model.attention.ring_attention import BlockAttention, ring_steps
from megatron.training.kernel_variants import RunShape, kernel_variants

META, BF16 = torch.device("meta"), torch.bfloat16
MODEL = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --micro-batch-size 1 --bf16 "
    "--lr 1e-3 --train-iters 1 --mock-data --vocab-size 99 --hidden-dropout 0"
)


def resolved(flags: str, world: int) -> Config:
    return resolve(parse_arguments(f"{MODEL} {flags}".split()).config, world, 99).config


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def compiled(call: Callable[[], Any]) -> set[str]:
    """What Triton compiles for the launches of a call."""
    found = set()

    def record(kernel: Any, _: Any, row: Any, *args: Any, **kwargs: Any) -> None:
        each = compiled_from("", kernel, row, dict(zip(kernel.arg_names, args)) | kwargs)
        found.add(str(replace(each, kernel=kernel.fn.__name__, row=None)))

    with lang.launches_to(record):
        call()
    return found


def check_covers(launched: set[str], config: Config, operator: str) -> None:
    """The check at start compiles all of it."""
    shape = RunShape(config, BF16, 128, 99)
    choices = {} if operator == "fp8" else {operator: Choice("triton")}
    variants = kernel_variants(shape, choices)[operator]
    missing = launched.difference(
        *(compiled(cases.case_of(variant, META).call) for variant in variants)
    )
    assert launched and not missing, "\n".join(sorted(missing))


def forward_and_backward(block: BlockAttention, steps: Any, length: int) -> None:
    for step in steps:
        q, dout, k, v = (empty(length, 1, 4, 64) for _ in range(4))
        q, dout, k, v = q[step.queries], dout[step.queries], k[step.keys], v[step.keys]
        out, lse = block.forward(q, k, v, mask=step.mask)
        block.backward(dout, out, lse, q, k, v, step.mask)


@pytest.mark.parametrize("comm", ["p2p", "a2a+p2p --hierarchical-context-parallel-sizes 2 2"])
@pytest.mark.parametrize(
    "flags",
    [
        "--attention-dropout 0",
        "--attention-dropout 0.1",
        "--attention-dropout 0 --window-size 8 --window-attn-skip-freq 2",
        "--attention-dropout 0 --window-size 8 --reset-attention-mask",
    ],
)
def test_the_steps_of_a_ring(comm, flags):
    """In training and in evaluation, of layers with a window and without."""
    config = resolved(
        f"--seq-length 64 --context-parallel-size 4 --cp-comm-type {comm} {flags} "
        "--attention-backend triton",
        4,
    )
    model, launched = config.model, set()
    places = empty(attention_ranks(config.distributed)[1], 16, dtype=torch.int64)
    starts = empty(1, 64) if config.data.reset_attention_mask else None
    windows = {each.window for each in layer_records(model)}
    for drop, window in product((model.attention_dropout, 0.0), windows):
        steps = ring_steps(places, 1, window, starts, by_positions=model.attention_dropout > 0)
        options = {"scale": model.softmax_scale, "drop": drop, "key": cases.KEY}
        ids = empty(1, dtype=torch.int64) if drop else None
        block = BlockAttention("triton", options | {"sample_ids": ids})
        launched |= compiled(partial(forward_and_backward, block, steps, 16))
    check_covers(launched, config, "attention")


@pytest.mark.parametrize("count, ep", [(2, 2), (16, 2), (16, 1), (24, 2)])
def test_the_gemms_of_a_ranks_experts(count, ep):
    config = resolved(
        f"--seq-length 64 --num-experts {count} --expert-model-parallel-size {ep} "
        "--moe-router-topk 2 --moe-ffn-hidden-size 136 --swiglu --disable-bias-linear",
        ep,
    )
    ends = empty(count // ep, dtype=torch.int32)

    def of_a_layer() -> None:
        for o, i in ((272, 256), (256, 136)):
            x, dy, weight = empty(40, i), empty(40, o), empty(count // ep, o, i)
            grouped_gemm(x, weight, ends, True)
            grouped_gemm(dy, weight, ends, False)
            for overwrite in (True, False):
                grad = empty(*weight.shape, dtype=torch.float32)
                grouped_weight_grad_(grad, dy, x, ends, overwrite)

    check_covers(compiled(of_a_layer), config, "grouped-gemm")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tokens", [128, 81])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_what_8_bit_floats_quantise(recipe, tokens, tp, monkeypatch):
    """Of rows that are wider than a program reads at once, and of those that ranks share."""
    monkeypatch.setattr(fp8, "quantise_by_definition", quantise)
    monkeypatch.setattr(fp8, "maxima_reference", find_maxima)
    monkeypatch.setattr(fp8, "all_reduce_max", lambda parts, axis: parts)
    wgrad = recipe != "rowwise" and tokens == 128
    config = resolved(
        f"--seq-length {tokens} --ffn-hidden-size 9216 --tensor-model-parallel-size {tp} "
        f"--fp8-format hybrid --fp8-recipe {recipe} --fp8-min-width 128 "
        + ("" if wgrad or recipe == "rowwise" else "--no-fp8-wgrad"),
        tp,
    )
    axis = ALONE if tp == 1 else Axis("tp", 0, (0, 1))

    def of_a_layer() -> None:
        for each in wide_linears(config.model, config.precision):
            split, (o, i) = each.split if tp > 1 else None, each.on_rank(tp)
            gemms = fp8.Fp8Gemms(fp8.SCALINGS[recipe], fp8.E5M2, wgrad, split, axis)
            x, weight, dy = empty(tokens, 1, i), empty(o, i), empty(tokens, 1, o)
            gemms.forward(x, weight, None)
            _, kept = gemms.input_grad(dy, weight, weight_grad=True)
            if wgrad:
                gemms.accumulate_weight_grad(kept, x, empty(o, i, dtype=torch.float32), True)

    check_covers(compiled(of_a_layer), config, "fp8")


def test_no_grid_is_taller_than_a_gpu_takes():
    """65535 blocks along all axes but the first, with more heads than that."""
    q, grids = empty(128, 4096, 17, 64).requires_grad_(), []
    with lang.launches_to(lambda _, grid, *args, **kwargs: grids.append(grid)):
        out, _ = flash_attention(q, q, q, scale=0.1, mask=attention_mask(128, 128))
        out.backward(empty(*out.shape))
    assert len(grids) == 4 and all(size <= 65535 for _, *others in grids for size in others)
