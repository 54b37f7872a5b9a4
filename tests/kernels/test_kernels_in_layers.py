"""A whole transformer layer by the kernels and by PyTorch: outputs and gradients."""

import dataclasses

import pytest
import torch
from checks import error
from selection import each_value
from unit.model.made import norm

from megatron.config.groups import ModelConfig
from megatron.model import compile
from megatron.model.compile import compile_layers
from megatron.model.gpt import GPTModel
from megatron.model.layer import TransformerLayer

pytestmark = pytest.mark.table(traits=each_value)

TRACED = "aot_eager_decomp_partition"  # all but the generation of code
S, B = 4, 2
PLAIN = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=40,
    num_attention_heads=4,
    kv_channels=8,
    num_query_groups=2,
    max_position_embeddings=S,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
LLAMA = dataclasses.replace(
    PLAIN,
    normalization="RMSNorm",
    activation="swiglu",
    position_embedding_type="rope",
    add_bias_linear=False,
)
MODELS = {
    "gpt": PLAIN,
    "gpt, dropout": dataclasses.replace(PLAIN, hidden_dropout=0.2, activation="gelu-tanh"),
    "llama": LLAMA,
    "qk norm, half rotation, biases": dataclasses.replace(
        LLAMA, qk_layernorm=True, rotary_percent=0.5, add_bias_linear=True, activation="geglu"
    ),
    "layer norm of heads": dataclasses.replace(
        LLAMA, normalization="LayerNorm", qk_layernorm=True, activation="squared-relu"
    ),
}
BACKENDS = ("norm_backend", "rotary_backend", "activation_backend", "dropout_backend")


def run(config, index, dtype, device, backend, compiled=False):
    """Output, dx and main_grads of a layer whose parameters and inputs are the same for all
    backends and precisions, but for rounding to bf16.
    """
    model = GPTModel(
        dataclasses.replace(config, **dict.fromkeys(BACKENDS, backend)),
        vocab_size=16,
        padded_vocab=16,
        dtype=dtype,
        seed=3,
    )
    layer: TransformerLayer = model.layers[str(index)].to_empty(device=device).to(dtype)
    if compiled:
        compile_layers(model, torch.device(device))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in layer.named_parameters():
        spread = 0.2 if parameter.ndim > 1 else 0.5
        value = torch.randn(parameter.shape, generator=generator) * spread
        value += name.endswith("norm.weight")
        parameter.data.copy_(value.bfloat16())
        wide = torch.promote_types(dtype, torch.float32)
        parameter.main_grad = torch.zeros(parameter.shape, dtype=wide, device=device)
    x, dy = (
        torch.randn(S, B, config.hidden_size, generator=generator).bfloat16().to(device, dtype)
        for _ in range(2)
    )
    ids, ones = torch.zeros(B, S, dtype=torch.int64), torch.ones(B, S)
    positions = torch.arange(S).expand(B, S)
    batch = (each.to(device) for each in (ids, ids, ones, positions, torch.tensor([3, 8])))
    y = layer(x.requires_grad_(), model.micro_batch(*batch, training=True))
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | {
        name: parameter.main_grad for name, parameter in layer.named_parameters()
    }


@pytest.mark.parametrize("name, index", [*((name, 1) for name in MODELS), ("gpt, dropout", 0)])
@pytest.mark.default(
    "gpt, dropout-0", "llama-1", "qk norm, half rotation, biases-1", "layer norm of heads-1"
)
def test_backends_agree(name, index, device):
    """In fp32 to roundings. In bf16 a tensor of few numbers may be lucky: over all of them ours is
    as far from float64 as PyTorch's, and none is lost (a dozen roundings of 2^-9 in a row make
    1e-2).
    """
    config = MODELS[name]
    torchs, ours = (
        run(config, index, torch.float32, device, backend) for backend in ("torch", "triton")
    )
    for key in torchs:
        assert error(ours[key], torchs[key].double()) < 3e-6, key
    assert any(not torch.equal(ours[key], torchs[key]) for key in ours)
    exact = run(config, index, torch.float64, device, "torch")
    torchs, ours = (
        run(config, index, torch.bfloat16, device, backend) for backend in ("torch", "triton")
    )
    errors = torch.tensor(
        [[error(result[key], exact[key]) for key in exact] for result in (torchs, ours)]
    )
    assert errors.max() < 3e-2 and errors[1].norm() < 1.1 * errors[0].norm(), errors


NAMES = ["gpt", "llama", "qk norm, half rotation, biases", "layer norm of heads"]


@pytest.mark.parametrize("backend, bound", [("triton", 0), ("torch", 6e-6)])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.default("llama-triton-0", "qk norm, half rotation, biases-torch-6e-06")
def test_a_compiled_layer_has_the_eager_gradients(monkeypatch, name, backend, bound, device):
    """In fp32, where a conversion to fp32 returns its argument. Our operators are not traced: every
    number is the same. Those of torch are traced and differentiated, with 100 roundings of 2^-24 in
    a row, all in one direction. On a CPU no code is generated.
    """
    if device.type == "cpu" or backend == "torch":
        monkeypatch.setattr(compile, "BACKEND", TRACED)
    more = {"attention_backend": "triton"} if backend == "triton" else {}
    config = dataclasses.replace(MODELS[name], **more)
    eager, compiled = (
        run(config, 1, torch.float32, device, backend, compiled=compiled)
        for compiled in (False, True)
    )
    for key in eager:
        assert (eager[key] - compiled[key]).norm() <= bound * eager[key].norm(), key


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_frozen_norm_is_left_alone(kind, device):
    layer = norm(kind, 16, backend="triton").to_empty(device=device)
    for parameter in layer.parameters():
        parameter.data.normal_()
        parameter.main_grad = torch.ones(16, device=device)
        parameter.requires_grad_(False)
    x = torch.randn(3, 2, 16, device=device).requires_grad_()
    layer(x).sum().backward()
    assert x.grad.any() and all((each.main_grad == 1).all() for each in layer.parameters())
