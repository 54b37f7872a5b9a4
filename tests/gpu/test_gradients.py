"""Every parameter's gradient of one backward pass on a GPU, with the kernels that `auto` takes and
under --torch-compile, against float64 on the host; and on any machine, that the comparison accepts
torch's operators and finds mistakes. `python -m pytest -m gpu tests/gpu/test_gradients.py`

Bounds. Between a parameter and the loss of LAYERS layers lie at most ROUNDINGS roundings, forward
and backward: in each direction some 14 a layer (two norms, four GEMMs, rotary embedding or bias,
attention's scores, probabilities and output, activation, two residual sums, a cast) and 4 of
embedding, final norm, head and loss. The unit roundoff u is 2^-9 in bf16 and 2^-24 in fp32.
Roundings are independent, so a relative error in the Frobenius norm is about sqrt(ROUNDINGS) u;
all of one sign it is ROUNDINGS u. In fp32 the sums of up to LONGEST terms round as well: sqrt of it
more. A gradient is faulty above the second figure, or where it is above the first and above twice
the error of torch's operators in the same precision: two errors of equal distribution differ by
less in a norm over the 32 elements or more of each parameter here.
"""

import math
from functools import cache

import pytest
import torch
from torch import Tensor
from unit.by_hand import backward, forward, loss_gradient

from megatron.config.arguments import parse_arguments
from megatron.config.validate import resolve
from megatron.distributed.groups import one_process
from megatron.model.build import build_model
from megatron.model.compile import compile_layers
from megatron.model.init import fill_initial
from megatron.parallel.blocks import build_blocks
from megatron.parallel.layer_runner import LayerRunner

CPU = torch.device("cpu")
LAYERS, VOCAB, S, B = 2, 250, 64, 2
ROUNDINGS = 2 * (14 * LAYERS + 4)
LONGEST = 256  # terms of a sum: tokens, channels or words
UNIT = {torch.bfloat16: 2.0**-9, torch.float32: 2.0**-24 * math.sqrt(LONGEST)}
BASE = f"""--num-layers {LAYERS} --hidden-size 128 --num-attention-heads 4 --seq-length {S}
--micro-batch-size {B} --global-batch-size {B} --train-iters 1 --mock-data --lr 1e-3
--tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --hidden-dropout 0 --attention-dropout 0"""
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
--untie-embeddings-and-output-weights"""
MODELS = {
    "gpt": "",  # LayerNorm, GELU, biases, learned positions, tied
    "llama": f"{LLAMA} --group-query-attention --num-query-groups 2",
    # each token goes to both: of more experts bf16 would choose others where scores are close
    "experts": f"{LLAMA} --num-experts 2 --moe-router-topk 2 --moe-ffn-hidden-size 96",
    "latent": f"{LLAMA} --multi-latent-attention --kv-lora-rank 48 --q-lora-rank 64 "
    "--qk-head-dim 32 --qk-pos-emb-head-dim 32 --v-head-dim 32 --qk-layernorm",
}
OPERATORS = ("norm", "rotary", "activation", "dropout", "cross-entropy")
BY_TORCH = (
    " ".join(f"--{operator}-backend torch" for operator in OPERATORS) + " --attention-backend plain"
)
PRECISION = {torch.bfloat16: "--bf16", torch.float32: "", torch.float64: "--fp64"}


def gradients(
    flags: str, dtype: torch.dtype, device: torch.device, *, compiled: bool = False
) -> dict[str, Tensor]:
    """Every parameter's gradient of one micro-batch's summed loss, in float64 on the host. Weights
    are the same numbers of bf16 in every precision.
    """
    words = f"{BASE} {flags} {PRECISION[dtype]}".split()
    config = resolve(parse_arguments(words).config, 1, VOCAB).config
    model = build_model(config, VOCAB, one_process(), device)
    for block in build_blocks(model, device):
        wide = torch.zeros(block.weight.numel(), dtype=torch.float32)
        for entry in block.entries:
            for box in entry.boxes:
                fill_initial(box, entry.view(wide), 5)
        block.weight.copy_(wide.bfloat16())
        block.open()
    if compiled:
        compile_layers(model, device)
    ids = torch.randint(0, VOCAB, (B, S + 1), generator=torch.Generator().manual_seed(1))
    batch = (ids[:, :-1], ids[:, 1:], torch.ones(B, S), torch.arange(S).expand(B, S))
    batch = (*batch, torch.arange(B))
    micro = model.micro_batch(*(each.to(device) for each in batch), training=True)
    passes = LayerRunner()
    out, saved = forward(model, micro, passes)
    backward(model, saved, loss_gradient(out, 1.0), passes)
    return {
        name: parameter.main_grad.detach().cpu().double()
        for name, parameter in model.named_parameters()
    }


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def faults(
    found: dict[str, Tensor],
    torchs: dict[str, Tensor],
    exact: dict[str, Tensor],
    dtype: torch.dtype,
) -> dict[str, str]:
    """Parameter -> what is wrong with its gradient."""
    assert found.keys() == torchs.keys() == exact.keys() and len(exact) > 10
    likely, worst = math.sqrt(ROUNDINGS) * UNIT[dtype], ROUNDINGS * UNIT[dtype]
    wrong = {}
    for name, expected in exact.items():
        assert expected.norm() > 0, f"{name}: the exact gradient is 0 and compares nothing"
        ours, theirs = error(found[name], expected), error(torchs[name], expected)
        bound = min(max(likely, 2 * theirs), worst)
        if not ours <= bound:  # NaN is wrong
            wrong[name] = f"off by {ours:.2g}, bound {bound:.2g}, torch's operators {theirs:.2g}"
    return wrong


@cache
def exact(model: str) -> dict[str, torch.Tensor]:
    return gradients(f"{MODELS[model]} {BY_TORCH}", torch.float64, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_float64(model, compiled, dtype):
    if compiled and model in ("experts", "latent"):
        pytest.skip("layers of these are compiled in tests/parity")
    device = torch.device("cuda", torch.cuda.current_device())
    flags = f"{MODELS[model]} --torch-compile" if compiled else MODELS[model]
    found = gradients(flags, dtype, device, compiled=compiled)
    torchs = gradients(f"{MODELS[model]} {BY_TORCH}", dtype, device)
    assert faults(found, torchs, exact(model), dtype) == {}


@pytest.mark.parametrize("model", MODELS)
def test_the_comparison_accepts_torch_and_finds_mistakes(model):
    """A lost gradient, a factor, a sign, rows in another order and NaN, one parameter at a
    time.
    """
    flags = f"{MODELS[model]} {BY_TORCH}"
    for dtype in (torch.float32, torch.bfloat16):
        found = gradients(flags, dtype, CPU)
        assert faults(found, found, exact(model), dtype) == {}, dtype
    for index, (name, gradient) in enumerate(found.items()):
        mistakes = (
            torch.zeros_like(gradient),
            1.2 * gradient,
            -gradient,
            gradient.flip(0),
            torch.full_like(gradient, torch.nan),
        )
        wrong = found | {name: mistakes[index % len(mistakes)]}
        assert faults(wrong, found, exact(model), torch.bfloat16).keys() == {name}
