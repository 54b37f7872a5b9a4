"""The table that chooses implementations: what auto takes, what is refused and with which way out,
and what a model is built from.
"""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron.kernels import apex, dispatch, fa4, lang
from megatron.kernels.dispatch import OPERATORS, choose, flag_of
from unit.model.made import norm

from megatron.config.groups import Config, ModelConfig, OptimizerConfig, PrecisionConfig
from megatron.model.kernels import choose_kernels, remarks
from megatron.model.linear import wgrad_gemm
from megatron.optimizer.optimizer import sum_of_squares

ROOT = Path(__file__).resolve().parents[2]
TRITON = [operator for operator, names in OPERATORS.items() if "triton" in names]
CPU, GPU, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
QUIET = ModelConfig(hidden_dropout=0.0, attention_dropout=0.0)
FALLBACK = {operator: names[-1] for operator, names in OPERATORS.items()} | {
    "attention": "sdpa",
    "adam": "torch-fused",
    "grouped-gemm": "grouped-mm",
}
WIN = dispatch.Measurement(
    "torch", 1.34, 1.3, 1.4, True, "NVIDIA H200", "2.13.0", "3.6.0", "2026-11-22"
)


def of(model=QUIET, **optimizer):
    return Config(
        model=model, optimizer=OptimizerConfig(**optimizer), precision=PrecisionConfig(bf16=True)
    )


def with_data(data, **model):
    config = of(dataclasses.replace(QUIET, **model))
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **data))


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """`fake(name, code)`: a module that is there for one test."""
    made = []

    def make(name: str, code: str = "") -> None:
        package, _, _ = name.rpartition(".")
        if package:
            (tmp_path / package).mkdir()
            (tmp_path / package / "__init__.py").write_text("")
        made.extend(filter(None, (package, name)))
        (tmp_path / f"{name.replace('.', '/')}.py").write_text(code)
        apex.missing.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    apex.missing.cache_clear()
    for name in made:
        sys.modules.pop(name, None)


@pytest.fixture
def no_interpreter(monkeypatch):
    monkeypatch.setattr(lang, "interpreted", lambda: False)


@pytest.fixture
def measured(monkeypatch):
    """A machine whose table lists that Triton, or apex where that is not to be had, wins
    everything.
    """
    won = {(op, name, lang.HOPPER): WIN for op in OPERATORS for name in ("triton", "apex")}
    monkeypatch.setattr(dispatch, "MEASURED", won)


def taken(operator, device=GPU, dtype=BF16):
    return choose(operator, "auto", device, dtype).implementation


def test_auto_on_a_cpu_is_torch(no_interpreter):
    for operator in OPERATORS:
        assert choose(operator, "auto", CPU, torch.float32) == dispatch.Choice(FALLBACK[operator])


def test_auto_takes_triton_where_it_has_been_measured_to_win(measured):
    won = dispatch.Choice("triton", "measured 1.34 times torch on NVIDIA H200")
    for operator in TRITON:
        assert choose(operator, "auto", GPU, BF16) == won
        assert taken(operator, dtype=torch.float64) == FALLBACK[operator]


def test_auto_takes_triton_unmeasured_where_it_is_checked_at_start(monkeypatch):
    """On the architectures of which that was decided."""
    unmeasured = dispatch.Choice("triton", dispatch.UNMEASURED)
    for operator in TRITON:
        if operator in dispatch.CHECKED:
            assert choose(operator, "auto", GPU, BF16) == unmeasured
        else:
            assert taken(operator) == FALLBACK[operator]
    for architecture in (86, 120):
        monkeypatch.setattr(lang, "capability", lambda device, found=architecture: found)
        assert all(taken(operator) == FALLBACK[operator] for operator in TRITON)


def refused(message: str, operator: str, wanted: str, device=GPU, dtype=BF16) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        choose(operator, wanted, device, dtype)


def refused_run(message: str, config, device=GPU) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        choose_kernels(config, device)


def test_what_failed_its_check_is_not_taken(monkeypatch):
    monkeypatch.setitem(dispatch.FAULTY, "norm", "the check at start failed")
    assert choose("norm", "auto", GPU, BF16) == dispatch.Choice(
        "torch", "triton: the check at start failed"
    )
    assert choose("rotary", "auto", GPU, BF16).implementation == "triton"
    message = "--norm-backend triton: the check at start failed; drop the flag, or take torch"
    refused(message, "norm", "triton")


@pytest.mark.parametrize(
    ("model", "data", "taken"),
    [
        ({}, {}, "auto"),
        ({"window_size": 64}, {}, "triton"),
        ({}, {"reset_attention_mask": True}, "triton"),
        ({"attention_dropout": 0.1}, {}, "triton"),
        ({"attn_logit_softcapping": 30.0}, {}, "triton"),
    ],
)
def test_auto_takes_our_attention_where_torchs_flash_kernel_cannot(model, data, taken, monkeypatch):
    """And on Hopper always."""
    monkeypatch.setattr(lang, "capability", lambda device: 80)
    config = with_data(data, kv_channels=64, **model)
    assert choose_kernels(config, GPU)[0].model.attention_backend == taken
    assert choose_kernels(config, CPU)[0].model.attention_backend == "auto"
    monkeypatch.setattr(lang, "capability", lambda device: lang.HOPPER)
    assert choose_kernels(config, GPU)[0].model.attention_backend == "triton"


@pytest.mark.parametrize(
    ("model", "data", "why"),
    [
        ({"window_size": 8}, {}, "cannot compute --window-size"),
        ({}, {"reset_attention_mask": True}, "cannot compute --reset-attention-mask"),
        ({"attn_logit_softcapping": 3.0}, {}, "cannot compute --attn-logit-softcapping"),
    ],
)
def test_what_fa4_cannot_compute_is_refused(model, data, why):
    config = with_data(data, kv_channels=64, attention_backend="fa4", **model)
    refused_run(f"--attention-backend fa4: {why}", config)


def shared(kind: str, backend: str, **model):
    """A run of four context-parallel ranks."""
    model = dataclasses.replace(QUIET, kv_channels=64, attention_backend=backend, **model)
    config = of(model)
    distributed = dataclasses.replace(
        config.distributed,
        context_parallel_size=4,
        cp_comm_type=kind,
        hierarchical_context_parallel_sizes=(2, 2) if kind == "a2a+p2p" else None,
    )
    return dataclasses.replace(config, distributed=distributed)


@pytest.mark.parametrize("backend", ["sdpa", "fa4"])
@pytest.mark.parametrize("kind", ["p2p", "a2a+p2p"])
def test_a_ring_on_a_gpu_needs_our_attention(kind, backend):
    message = f"--cp-comm-type {re.escape(kind)}: on a GPU .* triton"
    refused_run(message, shared(kind, backend))
    assert choose_kernels(shared(kind, "auto"), CPU)[0].model.attention_backend == "auto"


def test_a_ring_is_not_told_to_take_a_kernel_that_cannot_compute_it():
    config = shared("p2p", "auto")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, kv_channels=12))
    refused_run(".*multiple of 8.*; give --cp-comm-type allgather or a2a$", config)


@pytest.mark.parametrize(
    ("kind", "model", "is_able"),
    [
        ("allgather", {}, False),
        ("a2a", {"window_size": 8}, True),
        ("p2p", {}, True),
        ("a2a+p2p", {"window_size": 8}, False),
    ],
)
def test_kernels_in_gluon_know_no_positions(kind, model, is_able):
    """Nor does the fa4 backend."""
    config = shared(kind, "gluon", **model)
    if kind == "allgather":
        refused_run("--attention-backend fa4: masks by positions", shared(kind, "fa4", **model))
    if is_able:
        assert choose_kernels(config, GPU)[0].model.attention_backend == "gluon"
    else:
        refused_run("--attention-backend gluon: masks by positions, .* a2a", config)


@pytest.mark.parametrize(
    ("kind", "taken"), [("a2a", "auto"), ("allgather", "triton"), ("p2p", "triton")]
)
def test_auto_takes_our_attention_for_positions(kind, taken, monkeypatch):
    monkeypatch.setattr(lang, "capability", lambda device: 80)
    assert choose_kernels(shared(kind, "auto"), GPU)[0].model.attention_backend == taken


def test_fa4_is_taken_when_asked_for_alone():
    asked = of(dataclasses.replace(QUIET, kv_channels=64, attention_backend="fa4"))
    chosen, choices = choose_kernels(asked, GPU)
    assert chosen.model.attention_backend == choices["attention"].implementation == "fa4"
    assert "never run" in choices["attention"].because
    refused_run("--attention-backend fa4: it needs a GPU; drop the flag", asked, CPU)
    assert not fa4.is_installed() or torch.cuda.is_available()


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


def test_auto_says_what_it_did_not_take_on_a_gpu():
    unmeasured = f"triton is available if its flag asks for it; {dispatch.NOT_MEASURED}"
    assert choose("init", "auto", GPU, BF16) == dispatch.Choice("torch", unmeasured)
    wide = dispatch.Choice("sdpa", "triton: float64")
    assert choose("attention", "auto", GPU, torch.float64) == wide


def test_auto_does_not_take_what_was_measured_to_lose(monkeypatch):
    lost = dataclasses.replace(WIN, ratio=0.876, wins=False)
    monkeypatch.setattr(dispatch, "MEASURED", {("norm", "triton", lang.HOPPER): lost})
    assert choose("norm", "auto", GPU, BF16) == dispatch.Choice(
        "torch", "triton: measured 0.88 times torch on NVIDIA H200"
    )


def test_the_banner_groups_operators_by_reason():
    choices = {
        "norm": dispatch.Choice("torch", "slow"),
        "rotary": dispatch.Choice("triton"),
        "activation": dispatch.Choice("torch", "slow"),
    }
    assert remarks(choices) == ["norm, activation: slow"]


def test_what_cannot_be_had_is_refused_with_a_way_out(no_interpreter):
    refused(
        "--norm-backend triton: it needs a GPU; drop the flag, or take torch", "norm", "triton", CPU
    )
    refused(
        "--attention-backend triton: float64; drop the flag, or take sdpa or plain",
        *("attention", "triton", GPU, torch.float64),
    )
    refused(
        "--norm-backend apex: module fused_layer_norm_cuda is missing .*; drop the flag, .*",
        *("norm", "apex"),
    )
    for device, message, model in (
        (
            CPU,
            r"sdpa: cannot compute --attention-dropout above 0 \(use 0\); drop the flag, or take "
            "plain$",
            {"attention_dropout": 0.1},
        ),
        (GPU, "triton: .*; drop the flag, or take sdpa or plain$", {"kv_channels": 12}),
        (
            GPU,
            "triton: --no-deterministic-mode with soft-capping of attention at head dimension 128: "
            ".*, or take plain$",
            {"kv_channels": 128, "attn_logit_softcapping": 5.0, "deterministic_mode": False},
        ),
    ):
        asked = {"attention_backend": message.partition(":")[0], **model}
        config = of(dataclasses.replace(QUIET, **asked))
        refused_run(f"--attention-backend {message}", config, device)


@pytest.mark.parametrize("flag", ["exp_avg_dtype", "exp_avg_sq_dtype"])
def test_apex_is_not_given_narrow_moments(flag, monkeypatch, measured):
    monkeypatch.setattr(apex, "missing", lambda feature: None)
    monkeypatch.setattr(lang, "unfit", lambda device, dtype: "not here")
    for narrow, taken in (({}, "apex"), ({flag: "bf16"}, "torch-fused")):
        assert choose_kernels(of(**narrow), GPU)[0].optimizer.adam_implementation == taken
    message = "--adam-implementation apex: its moments are fp32, .*, or take torch-fused or torch$"
    refused_run(message, of(adam_implementation="apex", **{flag: "bf16"}))


def test_the_optimizers_rows(no_interpreter):
    message = (
        "--adam-implementation apex: module amp_C is missing .*, or take torch-fused or torch$"
    )
    refused_run(message, of(adam_implementation="apex"), CPU)
    message = "--grad-norm-backend triton: it needs a GPU; drop the flag, or take torch$"
    refused_run(message, of(grad_norm_backend="triton"), CPU)
    chosen, choices = choose_kernels(of(), CPU)
    assert (chosen.optimizer.adam_implementation, chosen.optimizer.grad_norm_backend) == (
        "torch-fused",
        "torch",
    )
    assert choose_kernels(chosen, CPU)[0] == chosen
    assert "adam" in choices and "adam" not in choose_kernels(of(optimizer="sgd"), CPU)[1]


def test_without_triton(monkeypatch, no_interpreter):
    monkeypatch.setattr(lang, "triton", None)
    assert lang.unfit(CPU, BF16) == "Triton is not installed (pip install triton)"
    assert choose("norm", "auto", CPU, BF16).implementation == "torch"


def test_a_model_is_built_without_auto(no_interpreter):
    chosen, choices = choose_kernels(of(), CPU)
    resolved = chosen.model
    operators = ("norm", "rotary", "activation", "dropout", "cross_entropy")
    assert {getattr(resolved, f"{name}_backend") for name in operators} == {"torch"}
    assert resolved.attention_backend == "auto" and choices["attention"].implementation == "sdpa"
    _, choices = choose_kernels(of(ModelConfig()), CPU)
    assert choices["attention"].implementation == "plain"


def test_in_the_interpreter_a_flag_forces_triton():
    if not lang.interpreted():
        pytest.skip("there is a GPU")
    fields = [flag_of(operator).removeprefix("--").replace("-", "_") for operator in TRITON]
    model = ModelConfig(hidden_size=16, num_experts=2, moe_ffn_hidden_size=16)
    forced = dataclasses.replace(
        model, **{field: "triton" for field in fields if hasattr(model, field)}
    )
    given = of(forced, adam_implementation="triton", grad_norm_backend="triton")
    chosen, choices = choose_kernels(given, CPU)
    assert {choices[operator].implementation for operator in TRITON} == {"triton"}
    assert chosen == dataclasses.replace(
        given, model=dataclasses.replace(forced, weight_grad_backend="torch")
    )


def test_the_impostor_apex_is_recognised(fake):
    for name in ("amp_C", "apex"):
        fake(name)
    assert apex.missing("adam").startswith("not NVIDIA's apex")


def test_apex_is_found_by_what_it_holds(fake):
    assert (
        apex.missing("norm")
        == "module fused_layer_norm_cuda is missing (NVIDIA's apex, built with its CUDA extensions)"
    )
    fake("fused_layer_norm_cuda", "def forward_affine(): ...\n")
    assert apex.missing("norm").startswith(
        "not NVIDIA's apex: module 'fused_layer_norm_cuda' has no attribute 'backward_affine'"
    )
    code = "def wgrad_gemm_accum_fp32(x, dy, grad):\n    grad.add_(dy.float().t() @ x.float())\n"
    fake("fused_weight_gradient_mlp_cuda", code)
    assert apex.missing("weight-grad") is None
    dy, x, grad = torch.randn(5, 1, 3).bfloat16(), torch.randn(5, 1, 4).bfloat16(), torch.ones(3, 4)
    product = dy[:, 0].float().t() @ x[:, 0].float()
    for overwrite, expected in ((False, 1 + product), (True, product)):
        wgrad_gemm(dy, x, grad, overwrite, by_apex=True)
        torch.testing.assert_close(grad, expected)


APEX_NORMS = """
import torch

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
"""


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_the_norms_of_apex_are_called_as_it_defines_them(kind, fake):
    """With a stand-in for its extension that has its functions' order of arguments: the real one
    has never been available.
    """
    fake("fused_layer_norm_cuda", APEX_NORMS)
    found = []
    for backend in ("torch", "apex"):
        layer = norm(kind, 8, 1e-5, backend).to_empty(device="cpu")
        for parameter in layer.parameters():
            parameter.data.copy_(torch.linspace(0.5, 1.5, 8))
            parameter.main_grad = torch.zeros(8)
        x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = layer(x)
        y.backward(torch.linspace(-1, 1, 48).view(3, 2, 8))
        found.append(
            [y.detach(), x.grad, *(parameter.main_grad for parameter in layer.parameters())]
        )
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


AMP_C = """
import torch

def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor):
    (tensors,) = tensor_lists
    assert chunk_size == 2048 * 32 and noop_flag.dtype == torch.int and per_tensor is False
    assert len({tensor.dtype for tensor in tensors}) == 1
    total = sum(tensor.float().square().sum() for tensor in tensors)
    noop_flag.fill_(int(not total.isfinite()))
    return total.sqrt().view(1), torch.empty(0)
"""
APPLIER = """
def multi_tensor_applier(op, noop_flag_buffer, tensor_lists, *args):
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)
"""


def test_the_norm_of_apex_is_called_as_it_defines_it(fake):
    """With stand-ins for its modules that have its functions' order of arguments: the real ones
    have never been available. What fp32 cannot hold is not taken for a gradient that is not
    finite.
    """
    fake("amp_C", AMP_C)
    fake("apex.multi_tensor_apply", APPLIER)
    assert apex.missing("grad-norm") is None
    pieces = [torch.randn(1000, generator=torch.Generator().manual_seed(0)), torch.randn(7)]
    exact, got = sum_of_squares(pieces), sum_of_squares(iter(pieces), CPU, "apex")
    assert got.dtype == torch.float64 and got.shape == () and got != exact
    assert float(got) == pytest.approx(float(exact), rel=1e-6)
    for value, finite in ((1e30, True), (torch.inf, False), (torch.nan, False)):
        pieces[1][3] = value
        assert sum_of_squares(pieces, CPU, "apex").isfinite() == finite
    assert float(sum_of_squares([], CPU, "apex")) == 0


def test_who_takes_the_norm_of_apex_is_told(monkeypatch):
    monkeypatch.setattr(apex, "missing", lambda feature: None)
    _, choices = choose_kernels(of(grad_norm_backend="apex"), GPU)
    assert (
        "grad-norm: apex adds up in fp32, the others in float64; where its sum overflows "
        "torch's is taken; never run"
    ) in remarks(choices)
    wide = dataclasses.replace(of(grad_norm_backend="apex"), precision=PrecisionConfig(fp64=True))
    message = "--grad-norm-backend apex: it adds up in fp32; drop the flag, or take torch$"
    refused_run(message, wide)
