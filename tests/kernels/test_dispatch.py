"""The table that chooses implementations: what auto takes, what is refused and with which way out,
and what a model is built from.
"""

import dataclasses
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron.kernels import apex, dispatch, lang
from megatron.kernels.dispatch import OPERATORS, Choice, choose
from unit.model.made import norm

from megatron.config.groups import Config, ModelConfig, OptimizerConfig, PrecisionConfig
from megatron.model import kernels
from megatron.model.kernels import choose_kernels, remarks
from megatron.model.linear import wgrad_gemm
from megatron.optimizer.optimizer import sum_of_squares

ROOT = Path(__file__).resolve().parents[2]
TRITON = [operator for operator, names in OPERATORS.items() if "triton" in names]
CPU, GPU, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
QUIET = ModelConfig(hidden_size=256, hidden_dropout=0.0, attention_dropout=0.0, kv_channels=64)
FALLBACK = {operator: names[-1] for operator, names in OPERATORS.items()} | {
    "attention": "sdpa",
    "adam": "torch-fused",
    "grouped-gemm": "grouped-mm",
}
WIN = dispatch.Measurement(True, "measured 1.34 times torch on NVIDIA H200")


def run(
    cp: str = "",
    documents: bool = False,
    optimizer: dict | None = None,
    precision: str = "bf16",
    **model,
) -> Config:
    """A run with a type of context parallelism over four ranks."""
    config = Config(
        model=dataclasses.replace(QUIET, **model),
        optimizer=OptimizerConfig(**optimizer or {}),
        precision=PrecisionConfig(**{precision: True} if precision != "fp32" else {}),
    )
    data = dataclasses.replace(config.data, reset_attention_mask=documents)
    sizes = {"context_parallel_size": 4, "cp_comm_type": cp} if cp else {}
    if cp == "a2a+p2p":
        sizes["hierarchical_context_parallel_sizes"] = (2, 2)
    distributed = dataclasses.replace(config.distributed, **sizes)
    return dataclasses.replace(config, data=data, distributed=distributed)


@pytest.fixture
def fake(monkeypatch):
    """`fake(name, function, ...)`: a module of these functions that is there for one test."""

    def make(name: str, *functions: Callable) -> None:
        module = types.ModuleType(name)
        vars(module).update({function.__name__: function for function in functions})
        monkeypatch.setitem(sys.modules, name, module)
        apex.missing.cache_clear()

    yield make
    apex.missing.cache_clear()


@pytest.fixture
def no_interpreter(monkeypatch):
    monkeypatch.setattr(lang, "interpreted", lambda: False)


def taken(operator, device=GPU, dtype=BF16):
    return choose(operator, "auto", device, dtype).implementation


def test_auto_on_a_cpu_is_torch(no_interpreter):
    for operator in OPERATORS:
        assert choose(operator, "auto", CPU, torch.float32) == Choice(FALLBACK[operator])


def test_auto_goes_by_what_was_measured(monkeypatch):
    won = {(operator, "triton", lang.HOPPER): WIN for operator in OPERATORS}
    monkeypatch.setattr(dispatch, "MEASURED", won)
    for operator in TRITON:
        choice = Choice("triton", WIN.text)
        assert choose(operator, "auto", GPU, BF16) == choice
        assert taken(operator, dtype=torch.float64) == FALLBACK[operator]
    won["norm", "triton", lang.HOPPER] = WIN._replace(wins=False)
    lost = Choice("torch", f"triton: {WIN.text}")
    assert choose("norm", "auto", GPU, BF16) == lost


def test_auto_takes_triton_unmeasured_where_it_is_checked_at_start(monkeypatch):
    """On the architectures of which that was decided."""
    for operator in TRITON:
        if operator in dispatch.CHECKED:
            choice = Choice("triton", dispatch.UNMEASURED)
            assert choose(operator, "auto", GPU, BF16) == choice
        else:
            assert taken(operator) == FALLBACK[operator]
    unmeasured = f"triton is available if its flag asks for it; {dispatch.NOT_MEASURED}"
    assert choose("grouped-gemm", "auto", GPU, BF16) == Choice("grouped-mm", unmeasured)
    for architecture in (86, 120):
        monkeypatch.setattr(lang, "capability", lambda device, found=architecture: found)
        assert all(taken(operator) == FALLBACK[operator] for operator in TRITON)


# (run, device's architecture or None for a CPU, attention's backend that is taken)
ATTENTION = [
    *((run(**given), None, "auto") for given in ({}, {"documents": True}, {"cp": "p2p"})),
    *((run(**given), 80, "auto") for given in ({}, {"cp": "a2a"})),
    # torch's flash kernel cannot
    (run(window_size=64), 80, "triton"),
    (run(documents=True), 80, "triton"),
    (run(attention_dropout=0.1), 80, "triton"),
    (run(attn_logit_softcapping=30.0), 80, "triton"),
    (run(cp="allgather"), 80, "triton"),
    (run(cp="p2p"), 80, "triton"),
    (run(), 90, "triton"),
    # in fp32 torch takes its memory-efficient kernel
    (run(precision="fp32"), 90, "auto"),
    (run(precision="fp32", window_size=64), 90, "triton"),
    # Gluon's kernels know no positions
    (run(cp="a2a", window_size=8, attention_backend="gluon"), 90, "gluon"),
    (run(cp="p2p", attention_backend="gluon"), 90, "gluon"),
    (run(attention_backend="fa4"), 90, "fa4"),
]


@pytest.mark.parametrize("config, architecture, backend", ATTENTION)
def test_attention_is_taken_by_what_it_has_to_compute(monkeypatch, config, architecture, backend):
    if architecture:
        monkeypatch.setattr(lang, "capability", lambda device: architecture)
    chosen, choices = choose_kernels(config, GPU if architecture else CPU)
    assert chosen.model.attention_backend == backend
    assert backend != "fa4" or "never run" in choices["attention"].because


CAUSAL, WINDOW = run(), run(window_size=64)
LOST = WIN._replace(wins=False)


# (run, architecture, measured of causal attention in bf16, what is taken)
MEASURED_ELSEWHERE = [
    (CAUSAL, 90, LOST, "sdpa"),
    (CAUSAL, 100, WIN, "triton"),
    (WINDOW, 100, WIN, "triton"),
    # what it lost to would read a mask of all scores, keep them, or give no log-sum-exp
    (WINDOW, 80, LOST, "triton"),
    (run(attention_dropout=0.1), 80, LOST, "triton"),
    (run(cp="p2p"), 80, LOST, "triton"),
    # kernels in fp32 are others
    (run(precision="fp32"), 90, WIN, "sdpa"),
    (run(precision="fp32", window_size=64), 90, LOST, "triton"),
]


@pytest.mark.parametrize("config, architecture, found, taken", MEASURED_ELSEWHERE)
def test_a_measurement_decides_what_was_measured(monkeypatch, config, architecture, found, taken):
    measured = {("attention", "triton", architecture): found}
    monkeypatch.setattr(dispatch, "MEASURED", measured)
    monkeypatch.setattr(lang, "capability", lambda device: architecture)
    _, choices = choose_kernels(config, GPU)
    assert choices["attention"].implementation == taken


def experts(precision: str = "bf16") -> Config:
    config = run(num_experts=4, moe_ffn_hidden_size=64, hidden_size=64, precision=precision)
    return config.with_fields("data", seq_length=64).with_fields("training", micro_batch_size=1)


def test_a_loss_in_16_bits_says_nothing_of_experts_in_fp32(monkeypatch):
    monkeypatch.setattr(dispatch, "MEASURED", {("grouped-gemm", "triton", lang.HOPPER): LOST})
    for precision, taken in (("bf16", "grouped-mm"), ("fp32", "triton")):
        _, choices = choose_kernels(experts(precision), GPU)
        assert choices["grouped-gemm"].implementation == taken


def test_older_gpus_than_the_table_take_torchs_operators(monkeypatch):
    reason = "a GPU of compute capability 7, the kernels need 8 or newer"
    monkeypatch.setattr(lang, "capability", lambda device: 75)
    monkeypatch.setattr(lang, "unsupported_reason", lambda device, dtype: reason)
    _, choices = choose_kernels(experts(), GPU)
    assert choices["attention"] == Choice("sdpa", f"triton: {reason}")
    assert {choice.implementation for choice in choices.values()}.isdisjoint(("triton", "apex"))
    with pytest.raises(ValueError, match="^--attention-backend triton: .* capability 7, .* sdpa"):
        choose_kernels(run(attention_backend="triton"), GPU)


@pytest.mark.parametrize("faulty", [True, False])
def test_a_ring_is_not_sent_to_kernels_that_are_refused(monkeypatch, faulty):
    if faulty:
        monkeypatch.setattr(dispatch, "FAULTY", {"attention": "off by 1"})
        monkeypatch.setattr(kernels, "FAULTY", dispatch.FAULTY)
    else:
        monkeypatch.setattr(lang, "unsupported_reason", lambda device, dtype: "no Triton")
    with pytest.raises(ValueError, match=r"; give --cp-comm-type allgather or a2a$"):
        choose_kernels(run(cp="p2p"), GPU)


CAPPED = {"attn_logit_softcapping": 5.0, "deterministic_mode": False, "kv_channels": 128}
APEX = {"optimizer": {"adam_implementation": "apex"}}
NARROW = {"optimizer": {"adam_implementation": "apex", "exp_avg_sq_dtype": "bf16"}}
NO_WAY = {"cp": "p2p", "kv_channels": 12}
TOO_WIDE = {"norm_backend": "triton", "hidden_size": 32776}
TORCHS = {"cp": "p2p", "attention_backend": "sdpa"}
# device, the run, beginning of the message
REFUSED = [
    (GPU, {"window_size": 8}, "--attention-backend fa4: cannot compute --window-size"),
    (GPU, {"cp": "allgather"}, "--attention-backend fa4: masks by positions"),
    (CPU, {}, "--attention-backend fa4: it needs a GPU; drop the flag"),
    (GPU, {"cp": "a2a+p2p", "window_size": 8}, "--attention-backend gluon: masks by .* a2a"),
    (
        CPU,
        {"attention_dropout": 0.1},
        "--attention-backend sdpa: cannot .*dropout.*, or take plain$",
    ),
    (GPU, {"kv_channels": 12}, "--attention-backend triton: .*; .*, or take sdpa or plain$"),
    (GPU, {"precision": "fp64"}, "--attention-backend triton: .*float64; .* sdpa or plain$"),
    (GPU, CAPPED, "--attention-backend triton: --no-deterministic-mode .*, or take plain$"),
    (GPU, TORCHS, "--cp-comm-type p2p: on a GPU .* triton"),
    (GPU, NO_WAY, ".*multiple of 8.*; give --cp-comm-type allgather or a2a$"),
    (GPU, TOO_WIDE, "--norm-backend triton: --hidden-size is above 32768; .*, or take torch$"),
    (CPU, {"norm_backend": "triton"}, "--norm-backend triton: it needs a GPU; .*, or take torch"),
    (CPU, APEX, "--adam-implementation apex: module amp_C is missing .*, or take torch-fused$"),
]


@pytest.mark.parametrize("device, given, message", REFUSED)
def test_what_cannot_be_had_is_refused_with_a_way_out(no_interpreter, device, given, message):
    if backend := re.match("--attention-backend (\\w+)", message):
        given = {"attention_backend": backend[1], **given}
    with pytest.raises(ValueError, match=f"^{message}"):
        choose_kernels(run(**given), device)


@pytest.mark.parametrize(
    "architecture, cuda, refused",
    [(90, "12.9", ""), (90, "13.0", ""), (90, None, ""), (90, "12.8", "12.8"), (100, "13", "10.0")],
)
def test_blocks_of_8_bit_floats_need_hopper(monkeypatch, architecture, cuda, refused):
    monkeypatch.setattr(lang, "capability", lambda device: architecture)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    config = run().with_fields("precision", fp8_format="e4m3", fp8_recipe="blockwise")
    if not refused:
        choose_kernels(config, GPU)
        return
    with pytest.raises(ValueError, match=f"^--fp8-recipe blockwise: .* not .*{refused}.*; give "):
        choose_kernels(config, GPU)


def test_apex_is_not_given_narrow_moments_nor_the_norm_of_float64(monkeypatch):
    won = {("adam", "apex", lang.HOPPER): WIN}
    monkeypatch.setattr(dispatch, "MEASURED", won)
    monkeypatch.setattr(apex, "missing", lambda feature: None)
    monkeypatch.setattr(lang, "unsupported_reason", lambda device, dtype: "not here")
    for narrow, name in (({}, "apex"), ({"exp_avg_dtype": "bf16"}, "torch-fused")):
        chosen, _ = choose_kernels(run(optimizer=narrow), GPU)
        assert chosen.optimizer.adam_implementation == name
    message = "--adam-implementation apex: its moments are fp32, .*, or take torch-fused$"
    with pytest.raises(ValueError, match=message):
        choose_kernels(run(**NARROW), GPU)
    wide = run(optimizer={"grad_norm_backend": "apex"}, precision="fp64")
    message = "--grad-norm-backend apex: it adds up in fp32; drop the flag, or take torch$"
    with pytest.raises(ValueError, match=message):
        choose_kernels(wide, GPU)


def test_what_is_loaded_when_it_is_asked_for(tmp_path):
    """In a separate process: nothing of a candidate for `auto`; FlashAttention-4, of a fake wheel,
    in the place of torch's flash kernels, which nothing gives back.
    """
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (tmp_path / "flash_attn" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "interface.py").write_text("_flash_attn_fwd = _flash_attn_bwd = print\n")
    code = (
        "import sys\n"
        "import torch\n"
        "from megatron.kernels import attention, dispatch, fa4\n"
        "from torch.nn.attention import current_flash_attention_impl\n"
        "for name in ('auto', 'gluon'):\n"
        "    dispatch.choose('attention', name, torch.device('cuda'), torch.bfloat16)\n"
        "    loaded = any('candidates' in module for module in sys.modules)\n"
        "    assert loaded == (name == 'gluon')\n"
        "assert fa4.is_installed()\n"
        "fa4.activate()\n"
        "assert current_flash_attention_impl() == 'FA4'\n"
        "cuda = torch.backends.cuda\n"
        "assert cuda.flash_sdp_enabled() and not cuda.cudnn_sdp_enabled()\n"
        "assert not cuda.mem_efficient_sdp_enabled() and not cuda.math_sdp_enabled()\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_without_triton(monkeypatch, no_interpreter):
    monkeypatch.setattr(lang, "triton", None)
    assert lang.unsupported_reason(CPU, BF16) == "Triton is not installed (pip install triton)"
    assert choose("norm", "auto", CPU, BF16).implementation == "torch"


def forward_affine(x, shape, weight, bias, eps):
    return torch.native_layer_norm(x, shape, weight, bias, eps)


def backward_affine(dy, mean, rstd, x, shape, weight, bias, eps, memory_efficient):
    outputs = [True, True, True]
    return torch.ops.aten.native_layer_norm_backward(
        dy, x, shape, mean, rstd, weight, bias, outputs
    )


def rms_forward_affine(x, shape, weight, eps):
    rstd = (x.square().mean(-1) + eps).rsqrt()
    return x * rstd[..., None] * weight, rstd


def rms_backward_affine(dy, rstd, x, shape, weight, eps, memory_efficient):
    normed = x * rstd[..., None]
    d = dy * weight
    dx = (d - normed * (d * normed).mean(-1, keepdim=True)) * rstd[..., None]
    return dx, (dy * normed).sum((0, 1))


def wgrad_gemm_accum_fp32(x, dy, grad):
    grad.add_(dy.float().t() @ x.float())


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor):
    (tensors,) = tensor_lists
    assert chunk_size == 2048 * 32 and noop_flag.dtype == torch.int and per_tensor is False
    assert len({tensor.dtype for tensor in tensors}) == 1
    total = sum(tensor.float().square().sum() for tensor in tensors)
    noop_flag.fill_(int(not total.isfinite()))
    return total.sqrt().view(1), torch.empty(0)


def multi_tensor_applier(op, noop_flag_buffer, tensor_lists, *args):
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def test_apex_is_found_by_what_it_holds(fake):
    """PyPI has another package of its name."""
    extensions = "(NVIDIA's apex, built with its CUDA extensions)"
    assert apex.missing("norm") == f"module fused_layer_norm_cuda is missing {extensions}"
    fake("fused_layer_norm_cuda", forward_affine)
    assert apex.missing("norm").startswith(
        "not NVIDIA's apex: module 'fused_layer_norm_cuda' has no attribute 'backward_affine'"
    )
    fake("amp_C")
    assert apex.missing("adam").startswith("not NVIDIA's apex")
    fake("fused_weight_gradient_mlp_cuda", wgrad_gemm_accum_fp32)
    assert apex.missing("weight-grad") is None
    dy, x, grad = torch.randn(5, 1, 3).bfloat16(), torch.randn(5, 1, 4).bfloat16(), torch.ones(3, 4)
    product = dy[:, 0].float().t() @ x[:, 0].float()
    for overwrite, expected in ((False, 1 + product), (True, product)):
        wgrad_gemm(dy, x, grad, overwrite, by_apex=True)
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_the_norms_of_apex_are_called_as_it_defines_them(kind, fake):
    """Uses stand-ins with apex's argument order; apex itself has never been available."""
    of_rms = (rms_forward_affine, rms_backward_affine)
    fake("fused_layer_norm_cuda", forward_affine, backward_affine, *of_rms)
    found = []
    for backend in ("torch", "apex"):
        layer = norm(kind, 8, 1e-5, backend).to_empty(device="cpu")
        for parameter in layer.parameters():
            parameter.data.copy_(torch.linspace(0.5, 1.5, 8))
            parameter.main_grad = torch.zeros(8)
        x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = layer(x)
        y.backward(torch.linspace(-1, 1, 48).view(3, 2, 8))
        found.append([y.detach(), x.grad, *(each.main_grad for each in layer.parameters())])
    torch.testing.assert_close(found[1], found[0])


def test_the_gradient_norm_of_apex_is_called_as_it_defines_it(fake):
    """What fp32 cannot hold is not taken for a gradient that is not finite."""
    fake("amp_C", multi_tensor_l2norm)
    fake("apex.multi_tensor_apply", multi_tensor_applier)
    assert apex.missing("grad-norm") is None
    pieces = [torch.randn(1000, generator=torch.Generator().manual_seed(0)), torch.randn(7)]
    exact, got = sum_of_squares(pieces), sum_of_squares(iter(pieces), CPU, "apex")
    assert got.dtype == torch.float64 and got.shape == () and got != exact
    assert float(got) == pytest.approx(float(exact), rel=1e-6)
    for value, finite in ((1e30, True), (torch.inf, False), (torch.nan, False)):
        pieces[1][3] = value
        assert sum_of_squares(pieces, CPU, "apex").isfinite() == finite
    assert float(sum_of_squares([], CPU, "apex")) == 0


def test_the_banner_groups_operators_by_reason(monkeypatch):
    choices = {"norm": Choice("torch", "slow"), "rotary": Choice("triton")}
    assert remarks(choices | {"activation": Choice("torch", "slow")}) == ["norm, activation: slow"]
    monkeypatch.setattr(apex, "missing", lambda feature: None)
    _, choices = choose_kernels(run(optimizer={"grad_norm_backend": "apex"}), GPU)
    assert (
        "grad-norm: apex adds up in fp32, the others in float64; where its sum overflows "
        "torch's is taken; never run"
    ) in remarks(choices)
