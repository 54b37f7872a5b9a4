"""FP8 GEMMs against a short definition in float64; which layers use them."""

import itertools
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from unit.model.made import linear

from megatron.config.arguments import parse_arguments
from megatron.config.groups import PrecisionConfig
from megatron.config.validate import resolve
from megatron.distributed.groups import ALONE, Layout, build_groups
from megatron.model import fp8
from megatron.model.build import build_model
from megatron.model.fp8 import FP8, mark_fp8
from megatron.model.linear import add_weight_grads, deferring_weight_grads

S, B, I, O = 80, 2, 192, 320
RECIPES = ("tensorwise", "rowwise", "blockwise")
FORMATS = ("e4m3", "hybrid")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def draw(*shape, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    # rows and columns of different sizes, so that a scale along the wrong one shows
    x *= torch.logspace(-2, 1, shape[-1], dtype=torch.float64)
    return (
        x * torch.logspace(-1, 1, shape[0], dtype=torch.float64).view(-1, *[1] * (x.dim() - 1))
    ).to(dtype)


def rounded(x, dtype, recipe):
    """x [m, n] as 8 bits have it, scaled along its rows."""
    width = {"tensorwise": x.numel(), "rowwise": x.shape[1], "blockwise": 128}[recipe]
    rows = x.float().reshape(1, -1) if recipe == "tensorwise" else x.float()
    done = []
    for piece in rows.split(width, dim=1):
        scale = piece.abs().amax(1, keepdim=True) * (1 / torch.finfo(dtype).max)
        done.append((piece * (1 / scale)).to(dtype).float() * scale)
    return torch.cat(done, 1).view(x.shape).double()


def expected(x, dy, weight, recipe, grads, wgrad):
    """(y, dx, dW) of x [tokens, i] and dy [tokens, o]."""
    y = rounded(x, E4M3, recipe) @ rounded(weight, E4M3, recipe).t()
    dx = rounded(dy, grads, recipe) @ rounded(weight.t(), E4M3, recipe).t()
    if wgrad:
        dw = rounded(dy.t(), grads, recipe) @ rounded(x.t(), E4M3, recipe).t()
    else:
        dw = dy.t() @ x
    return y, dx, dw


def marked(recipe, form, dtype, wgrad=True, bias=False):
    layer = linear(I, O, bias).to_empty(device="cpu").to(dtype)
    layer.weight.data.copy_(draw(O, I, seed=1))
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros(
            parameter.shape, dtype=torch.promote_types(dtype, torch.float32)
        )
    if bias:
        layer.bias.data.copy_(draw(O, seed=4))
    precision = PrecisionConfig(fp8_format=form, fp8_recipe=recipe, fp8_wgrad=wgrad)
    mark_fp8(layer.weight, precision, 0, ALONE)
    return layer


def step(layer, dtype):
    """(y, dx, dW) of a step of the layer, its inputs, and the gradient of its outputs."""
    x, dy = draw(S, B, I, seed=2, dtype=dtype), draw(S, B, O, seed=3, dtype=dtype)
    own = x.clone().requires_grad_()
    y = layer(own)
    y.backward(dy)
    return (y.detach(), own.grad, layer.weight.main_grad), x.flatten(0, 1), dy.flatten(0, 1)


@pytest.mark.parametrize(
    "recipe, form, wgrad", [*itertools.product(RECIPES, FORMATS, (True, False))]
)
def test_products_are_those_of_the_definition(recipe, form, wgrad):
    layer = marked(recipe, form, torch.float64, wgrad, bias=True)
    found, x, dy = step(layer, torch.float64)
    grads = E5M2 if form == "hybrid" else E4M3
    right = expected(x, dy, layer.weight.detach(), recipe, grads, wgrad and recipe != "rowwise")
    right = (right[0] + layer.bias.detach(), *right[1:])
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a.flatten(0, -2), b, rtol=1e-12, atol=1e-12 * b.abs().max())
    # and they are not what is right in another recipe: the definition differs
    for other in RECIPES:
        if other != recipe:
            wrong = expected(x, dy, layer.weight.detach(), other, grads, wgrad)
            assert (found[1].flatten(0, -2) - wrong[1]).norm() > 1e-3 * right[1].norm()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_runs_round_the_result_once(recipe, dtype):
    layer = marked(recipe, "e4m3", dtype)
    found, x, dy = step(layer, dtype)
    right = expected(
        x.double(), dy.double(), layer.weight.detach().double(), recipe, E4M3, recipe != "rowwise"
    )
    # y and dx are rounded to the run's precision, the weight's gradient to fp32, or where it is no
    # product of 8-bit floats as a CPU's GEMM rounds it
    own = torch.finfo(dtype).eps
    units = (own, own, own if recipe == "rowwise" else torch.finfo(torch.float32).eps)
    for a, b, unit in zip(found, right, units, strict=True):
        # in addition, fp32 sums of as many products
        assert (a.flatten(0, -2).double() - b).norm() <= (unit + 2e-6) * b.norm()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_split_backward_pass_has_the_same_bits(recipe):
    whole, split = (marked(recipe, "hybrid", torch.bfloat16) for _ in range(2))
    found, _, _ = step(whole, torch.bfloat16)
    with deferring_weight_grads(split) as left:
        apart, _, _ = step(split, torch.bfloat16)
    assert not split.weight.main_grad.any()
    add_weight_grads(left)
    assert all(torch.equal(a, b) for a, b in zip(found, apart, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_formed_in_pieces_and_added_or_overwritten(recipe):
    whole, pieces, written = (marked(recipe, "e4m3", torch.bfloat16) for _ in range(3))
    step(whole, torch.bfloat16)
    pieces.weight.main_grad.fill_(1.0)
    written.weight.main_grad.fill_(1.0)
    written.weight.overwrite_main_grad = True
    with (
        mock.patch.object(fp8, "PIECE_BYTES", 4 * I * 128),
        mock.patch.object(fp8, "scaled_gemm", wraps=fp8.scaled_gemm) as gemms,
    ):
        for layer in (pieces, written):
            step(layer, torch.bfloat16)
    pieces_of_dw = 0 if recipe == "rowwise" else -(-O // 128)
    assert gemms.call_count == 2 * (2 + pieces_of_dw)  # y and dx
    assert torch.equal(written.weight.main_grad, whole.weight.main_grad)
    torch.testing.assert_close(
        pieces.weight.main_grad - 1, whole.weight.main_grad, rtol=0, atol=1e-3
    )


FLAGS = """--num-layers 4 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4
--seq-length 32 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 99"""
E4M3_WIDE = "--fp8-format e4m3 --fp8-min-width 128"


def resolved(flags):
    return resolve(parse_arguments(f"{FLAGS} {flags}".split()).config, 1, 100).config


def in_fp8(flags):
    """The names of the weights that are marked."""
    config = resolved(flags)
    groups = build_groups(Layout(), 0, lambda *_: None)
    model = build_model(config, 100, groups, torch.device("cpu"))
    return {name for name, parameter in model.named_parameters() if hasattr(parameter, FP8)}


def test_the_wide_linear_layers_of_the_layers_that_are_named():
    of_layer = ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")

    def names(layers, linears=of_layer):
        return {f"layers.{layer}.{linear}.weight" for layer in layers for linear in linears}

    assert in_fp8("") == set()
    # neither the head nor the embedding, as wide as they are
    assert in_fp8(E4M3_WIDE) == names(range(4))
    first_last = f"{E4M3_WIDE} --first-last-layers-bf16"
    assert in_fp8(first_last) == names((1, 2))
    assert in_fp8(f"{first_last} --num-layers-at-start-in-bf16 2") == names((2,))
    assert in_fp8(f"{first_last} --num-layers-at-end-in-bf16 0") == names((1, 2, 3))
    # the fewer of a layer's inputs and outputs count: 64 of the attention's heads
    narrow = f"{E4M3_WIDE} --kv-channels 16"
    assert in_fp8(narrow) == names(range(4), ("attention.qkv", "mlp.fc1", "mlp.fc2"))


def test_what_megatrons_flags_become():
    theirs, ours = "--fp8-e4m3 --disable-fp8-wgrad", "--fp8-format e4m3 --no-fp8-wgrad"
    found, right = (resolved(f"{words} --fp8-min-width 128") for words in (theirs, ours))
    assert found.precision == right.precision


@pytest.mark.parametrize("recipe, form", [*itertools.product(RECIPES, FORMATS)])
def test_a_gpu_is_given_what_its_products_take(recipe, form):
    """Shapes, strides and types of all factors and scales, as torch checks them on tensors that
    have nothing else.
    """
    precision = PrecisionConfig(fp8_format=form, fp8_recipe=recipe)
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(O, 256, device="cuda", dtype=torch.bfloat16))
        main_grad = torch.empty(O, 256, device="cuda")
        mark_fp8(weight, precision, 0, ALONE)
        products = getattr(weight, FP8, None)
        x = torch.empty(64, 2, 256, device="cuda", dtype=torch.bfloat16)
        bias = torch.empty(O, device="cuda", dtype=torch.bfloat16)
        y = products.forward(x, weight, bias)
        assert (y.shape, y.dtype, y.device.type) == ((64, 2, O), torch.bfloat16, "cuda")
        for together in (True, False):
            dx, kept = products.input_grad(y, weight, weight_grad=together)
            assert (dx.shape, dx.dtype) == (x.shape, torch.bfloat16)
            if products.weight_grad:
                with mock.patch.object(fp8, "PIECE_BYTES", 4 * 256 * 128):
                    products.accumulate_weight_grad(kept, x, main_grad, overwrite=False)
