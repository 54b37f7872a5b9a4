"""Products of experts in one launch, against the definition in float64: rows, gradients of rows and
of weights, experts without rows, tiles that are partly empty; what the layer and the dispatch table
make of it.
"""

import dataclasses
from functools import partial

import pytest
import torch
from checks import assert_as_good, check_case
from megatron.kernels import dispatch, lang
from megatron.kernels import grouped_gemm as module
from megatron.kernels.configurations import Row
from megatron.kernels.grouped_gemm import (
    grouped_gemm_reference,
    grouped_weight_grad_reference,
)
from megatron.kernels.tools.shipped import _launched
from torch import nn

from megatron.config.groups import (
    Config,
    DataConfig,
    ModelConfig,
    PrecisionConfig,
    TrainingConfig,
)
from megatron.model.experts.experts import RowCounts, expert_gemms, expert_wgrad_gemms
from megatron.model.kernels import choose_kernels, expert_gemm_flops
from megatron.model.linear import accumulate_weight_grad

pytestmark = pytest.mark.table

BACKENDS = ["torch", "grouped-mm", "triton"]
# rows of each expert, outputs, inputs
SHAPES = [((5, 0, 40, 1), 40, 24), ((0, 0, 33), 16, 72), ((32,), 32, 32)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles an expert, several experts a tile's worth of rows, in few elements."""
    sizes = {"M": 16, "N": 32, "K": 16, "num_warps": 4, "num_stages": 2}
    monkeypatch.setattr(
        module, "find", lambda operator, arch, **key: Row(operator, arch, key, sizes)
    )
    monkeypatch.setattr(module, "GROUP", 2)


def draw(counts, o, i, dtype, device):
    generator = torch.Generator().manual_seed(sum(counts) + o)
    rows = sum(counts)
    x, dy, weight = (
        torch.randn(*shape, generator=generator).to(device, dtype)
        for shape in ((rows, i), (rows, o), (len(counts), o, i))
    )
    ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    return x, dy, weight, ends


@pytest.mark.parametrize("what", ["rows", "weight"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("counts, o, i", SHAPES)
def test_against_the_definition(device, counts, o, i, dtype, what):
    settings = {"counts": counts, "o": o, "i": i}
    check_case(f"grouped_gemm {what}", settings, dtype, device, allocates=what == "rows")


def test_the_number_of_rows_changes_no_compilation():
    """With expert parallelism it differs from step to step: here 1, 16 and 17 tiles."""
    sizes = {"o": 32, "i": 16}
    first, *others = (
        _launched(
            (("y", "dx"), "grouped_gemm rows", "bfloat16", sizes | {"counts": (rows,)}), lang.HOPPER
        )
        for rows in (16, 256, 272)
    )
    assert len(first) == 2 and others == [first, first]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts, o, i", SHAPES)
def test_every_backend_is_the_loop(device, counts, o, i, dtype, backend):
    """Of the layer: products and the gradient in main_grad, from counts on the host or device."""
    x, dy, weight, ends = draw(counts, o, i, dtype, device)
    rows = RowCounts.of(backend, torch.tensor(counts, device=device), counts)
    assert (rows.ends is None) == (backend == "torch")
    flat = weight.flatten(0, 1)
    for given, turned in ((x, True), (dy, False)):
        found = expert_gemms(given, flat, rows, turned=turned)
        exact = grouped_gemm_reference(given.double(), weight.double(), ends, turned)
        torchs = grouped_gemm_reference(given, weight, ends, turned)
        assert_as_good(found, exact, torchs)
    parameter = nn.Parameter(flat)
    exact = grouped_weight_grad_reference(dy.double(), x.double(), ends)
    for overwrite in (True, False):
        parameter.overwrite_main_grad = overwrite
        if overwrite:
            parameter.main_grad = torch.full_like(flat, torch.nan, dtype=torch.float32)
        wgrad = partial(expert_wgrad_gemms, counts=rows)
        accumulate_weight_grad(dy, x, parameter, wgrad)
        exact = exact if overwrite else 2 * exact
        torch.testing.assert_close(
            parameter.main_grad.view(weight.shape), exact.float(), rtol=1e-5, atol=1e-5
        )
        assert parameter.overwrite_main_grad is False


def mixture(fp64=False, **changes):
    given = {"hidden_size": 64, "activation": "swiglu", "num_experts": 8, "moe_router_topk": 2}
    given |= {"moe_ffn_hidden_size": 32, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return Config(
        model=ModelConfig(**given | changes),
        data=DataConfig(seq_length=128),
        training=TrainingConfig(micro_batch_size=2),
        precision=PrecisionConfig(fp64=True) if fp64 else PrecisionConfig(bf16=True),
    )


def chosen(config, device="cpu"):
    return choose_kernels(config, torch.device(device))[1]["grouped-gemm"].implementation


def test_what_auto_takes(monkeypatch):
    # 256 tokens x 2 choices / 8 experts, 64 -> 2 x 32
    assert expert_gemm_flops(mixture()) == 2 * 64 * 64 * 64
    monkeypatch.setattr(dispatch.lang, "interpreted", lambda: False)
    large = mixture(hidden_size=8192, moe_ffn_hidden_size=28672)
    for config, on_cpu, on_gpu in (
        (mixture(), "grouped-mm", "triton"),
        (large, "torch", "torch"),
        (mixture(moe_ffn_hidden_size=18), "torch", "triton"),  # rows of 36 bytes
        (mixture(fp64=True), "torch", "torch"),
    ):
        assert (chosen(config), chosen(config, "cuda")) == (on_cpu, on_gpu)
    dense = dataclasses.replace(mixture(), model=ModelConfig(hidden_size=64))
    assert "grouped-gemm" not in choose_kernels(dense, torch.device("cpu"))[1]


def test_what_is_refused(monkeypatch):
    with pytest.raises(dispatch.UserError, match="an expert's width 18 is not a multiple of 16 by"):
        chosen(mixture(moe_ffn_hidden_size=18, grouped_gemm_backend="grouped-mm"))
    with pytest.raises(dispatch.UserError, match="--grouped-gemm-backend triton: float64; drop"):
        chosen(mixture(fp64=True, grouped_gemm_backend="triton"))
    monkeypatch.undo()  # the rows as they are shipped
    assert module.unsupported_reason(2, 90) is None and module.unsupported_reason(2, 80) is None
    assert "KiB of shared memory for a block of threads" in str(module.unsupported_reason(2, 120))
