"""Each layer against torch's own, forward bit for bit, gradients in float64."""

import typing
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.kernels.activation import FUNCTIONS, GATES
from megatron.kernels.attention import attention_reference
from megatron.kernels.attention_masks import AttentionMask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from unit.model.made import linear, norm

from megatron.config.model import ACTIVATIONS, ModelConfig
from megatron.model import linear as linear_module
from megatron.model import loss as loss_module
from megatron.model import mlp
from megatron.model.attention import attention
from megatron.model.attention.attention import choose_attention
from megatron.model.embedding import accumulate_embedding_grad
from megatron.model.linear import add_weight_grads, deferring_weight_grads, wgrad_gemm
from megatron.model.loss import cross_entropy, sharded_cross_entropy
from megatron.model.norm import NORMS, AddNorm

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def randn(*shape, dtype=torch.float64, seed=0, grad=False):
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(
        dtype
    )
    return x.requires_grad_(grad)


def materialise(module, dtype=torch.float64):
    """Random storage and zeroed main_grad for a module born on the meta device."""
    module.to_empty(device="cpu").to(dtype)
    for i, p in enumerate(module.parameters()):
        p.data.copy_(randn(*p.shape, seed=100 + i) * 0.3)
        p.main_grad = torch.zeros(p.shape, dtype=torch.promote_types(dtype, torch.float32))
    return module


class Largest(TorchDispatchMode):
    """The largest tensor, in bytes, that any operator newly returned."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_make_no_dense_temporary(dtype, monkeypatch):
    monkeypatch.setattr(linear_module, "SCRATCH_BYTES", 1 << 14)
    monkeypatch.setattr("megatron.model.embedding.SCRATCH_BYTES", 1 << 14)
    x, dy = randn(4, 2, 256, dtype=dtype), randn(4, 2, 512, dtype=dtype, seed=1)
    grad = torch.zeros(512, 256)
    with Largest() as largest:
        wgrad_gemm(dy, x, grad)
    assert largest.bytes <= 1 << 14 < grad.nbytes
    expected = dy.flatten(0, 1).double().T @ x.flatten(0, 1).double()
    # a bf16 GEMM rounds its result once, to 8 bits
    bound = 1e-6 + (2**-9 if dtype == torch.bfloat16 else 0)
    assert (grad - expected).norm() / expected.norm() < bound
    layer = materialise(linear(256, 512, False), dtype)
    with deferring_weight_grads(layer) as left:
        layer(x.clone().requires_grad_()).backward(dy)
    with Largest() as largest:  # left for later too
        add_weight_grads(left)
    assert largest.bytes <= 1 << 14 and torch.equal(layer.weight.main_grad, grad)
    ids, grad = torch.tensor([[3, 3], [1, 0], [3, 2], [0, 9]]), torch.zeros(3000, 256)
    with Largest() as largest:
        accumulate_embedding_grad(x, ids, grad)
    assert largest.bytes <= 1 << 14 < grad.nbytes
    expected = torch.zeros(3000, 256).index_add_(0, ids.flatten(), x.flatten(0, 1).float())
    torch.testing.assert_close(grad, expected)


class Operators(TorchDispatchMode):
    """The names of what is computed."""

    def __enter__(self):
        self.names = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype, count", [(torch.float32, 2), (torch.float64, 0)])
def test_onednn_multiplies_fp32_on_a_cpu(dtype, count):
    """Forward and dgrad; sums of 48 products of numbers near 1 are off by 48 x 2^-24 at most."""
    layer = materialise(linear(48, 16, bias=True), dtype)
    x = randn(3, 2, 48, dtype=dtype, grad=True)
    with Operators() as operators:
        y = layer(x)
        y.sum().backward()
    assert operators.names.count("_linear_pointwise") == count
    weight, bias = layer.weight.double(), layer.bias.double()
    expected = F.linear(x.double(), weight, bias), weight.sum(0).expand(x.shape)
    for found, wide in zip((y, x.grad), expected, strict=True):
        bound = 48 * 2**-24 * (48 * x.abs().max() * weight.abs().max() + bias.abs().max())
        assert (found - wide).abs().max() <= bound


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_in_bf16_keep_statistics_wide(kind):
    """|error| of a bf16 result computed with wide statistics: a few roundings of 2^-9 relative to
    the row's scale.
    """
    ours, exact = materialise(norm(kind, 256), torch.bfloat16), norm(kind, 256)
    materialise(exact)
    with torch.no_grad():
        for p, q in zip(exact.parameters(), ours.parameters()):
            p.copy_(q)
    x = randn(64, 2, 256, dtype=torch.bfloat16)
    y, y2 = ours(x).double(), exact(x.double())
    assert (y - y2).norm() / y2.norm() < 2**-8


def test_every_norm_of_the_flag_is_an_entry_of_its_table():
    assert set(typing.get_args(typing.get_type_hints(ModelConfig)["normalization"])) == set(NORMS)


def test_a_gated_activation_is_entries_of_three_tables(monkeypatch):
    monkeypatch.setitem(ACTIVATIONS, "reglu", True)
    with pytest.raises(KeyError, match="--activation reglu: needs an entry"):
        mlp.check_tables()
    monkeypatch.setitem(FUNCTIONS, "reglu", F.relu)
    with pytest.raises(KeyError, match="GATES"):
        mlp.check_tables()

    def gradient(dy, a, grad_input):
        return torch.ops.aten.threshold_backward.grad_input(dy, a, 0, grad_input=grad_input)

    monkeypatch.setitem(GATES, "reglu", (torch.ops.aten.relu.out, gradient))
    mlp.check_tables()
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    y = mlp.activation_function("reglu")(x)
    torch.testing.assert_close(y, F.relu(x[:, :4]) * x[:, 4:], rtol=0, atol=0)
    assert torch.autograd.gradcheck(mlp.activation_function("reglu"), x)


@pytest.mark.parametrize("backend", ["torch", "triton", "apex"])
def test_a_norm_without_kernels_is_computed_by_torch(backend, monkeypatch):
    monkeypatch.setitem(NORMS, "RMSNorm", NORMS["RMSNorm"]._replace(kernels=False))
    ours = materialise(norm("RMSNorm", 8, backend=backend, layer=AddNorm))
    x = randn(4, 8)
    expected = F.rms_norm(x, (8,), ours.weight, ours.eps)
    torch.testing.assert_close(ours(x)[0], expected, **TIGHT)


@pytest.mark.parametrize(
    "tokens, outputs, cut",
    [
        (128 * 12, 256 * 11, True),  # 132 tiles
        (128 * 12 - 127, 256 * 11 - 255, True),  # as many, some of them nearly empty
        (128 * 11, 256 * 11, False),
    ],
)
def test_a_product_is_cut_where_a_piece_fills_a_gpu(monkeypatch, tokens, outputs, cut):
    monkeypatch.setattr(linear_module, "multiprocessors", lambda device: {"a GPU": 132}[device])
    on_gpu = SimpleNamespace(shape=torch.Size((tokens, 1, 12)), is_cuda=True, device="a GPU")
    assert linear_module.worth_cutting(on_gpu, None, outputs) is cut
    assert linear_module.worth_cutting(torch.empty(1, 1, 12), None, 1)  # on a CPU always


# ---- attention ----

S, B, N, G, D = 12, 2, 4, 2, 8


def test_choose_attention():
    def chosen(training=True, **more):
        return choose_attention(ModelConfig(**more), training=training)

    assert chosen(attention_dropout=0.1) == "plain"
    assert chosen(attention_dropout=0.1, training=False) == "sdpa"
    assert chosen(attention_dropout=0.0) == "sdpa"
    assert chosen(attention_dropout=0.0, attention_backend="plain") == "plain"


# ---- loss ----


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_cross_entropy(softcap, z_loss, monkeypatch):
    monkeypatch.setitem(loss_module.LOSS_CHUNK_BYTES, "cpu", 200)  # several chunks
    s, b, v, padded = 5, 3, 17, 24
    logits, weights = randn(s, b, padded) * 4, randn(s, b, seed=5)
    labels = torch.randint(0, v, (s, b), generator=torch.Generator().manual_seed(0))
    reference = logits.clone().requires_grad_()
    z = reference[..., :v]
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    lse = torch.logsumexp(z, -1)
    expected = F.cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="none").view(s, b)
    ((expected + z_loss * lse**2) * weights).sum().backward()
    ours = logits.clone().requires_grad_()
    inner = ours * 1.0
    loss, got_lse = cross_entropy(inner, labels, sharded_cross_entropy(padded, v, softcap))
    torch.testing.assert_close(loss, expected, **TIGHT)
    torch.testing.assert_close(got_lse, lse, **TIGHT)
    ((loss + z_loss * got_lse**2) * weights).sum().backward()
    torch.testing.assert_close(ours.grad, reference.grad, **TIGHT)
    assert (ours.grad[..., v:] == 0).all()


def test_cross_entropy_gradient_takes_the_logits_storage():
    inner = randn(4, 2, 64, dtype=torch.float32, grad=True) * 1.0
    labels = torch.zeros(4, 2, dtype=torch.int64)
    loss, _ = cross_entropy(inner, labels, sharded_cross_entropy(64, 64))
    seen = []
    inner.register_hook(lambda g: seen.append(g.data_ptr()))
    loss.sum().backward()
    assert seen == [inner.data_ptr()]


def test_cross_entropy_refuses_logits_that_it_would_have_to_copy():
    logits = randn(2, 4, 64, dtype=torch.float32).transpose(0, 1)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        cross_entropy(logits, torch.zeros(4, 2, dtype=torch.int64), sharded_cross_entropy(64, 64))


def test_embedding_gradient_has_the_same_bits_every_time_on_many_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        ids, dy = torch.randint(0, 50, (4096, 1)), torch.randn(4096, 1, 64)
        sums = []
        for _ in range(20):
            sums.append(torch.zeros(50, 64))
            accumulate_embedding_grad(dy, ids, sums[-1])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(sums[0], other) for other in sums)


def test_embedding_gradient_in_bf16_is_rounded_once_a_micro_batch(monkeypatch):
    """Not at each token: of 4096 equal ones, rows far below the sum's last bit must count."""
    monkeypatch.setattr("megatron.model.embedding.SCRATCH_BYTES", 24 * 4 * 4096)  # of 64 columns
    ids, dy = torch.randint(0, 5, (4096, 1)), torch.rand(4096, 1, 64)
    grad = torch.rand(7, 64).bfloat16()
    expected = grad.double().index_add_(0, ids.flatten(), dy.flatten(0, 1).double())
    accumulate_embedding_grad(dy, ids, grad)
    torch.testing.assert_close(grad.double(), expected, rtol=2**-8, atol=0)


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda"))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_grouped_heads_never_take_all_scores_into_memory(monkeypatch, groups, masked):
    """torch's memory-efficient kernel takes a mask and no groups; FLASH takes groups, no mask, and
    half precision only; anything else is its math path.
    """
    s, b, n, d = 6, 2, 4, 8
    draw = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(s, b, heads, d, dtype=torch.float64, generator=draw)
        for heads in (n, groups, groups)
    )
    starts = torch.tensor([[0, 0, 0, 3, 3, 3], [0, 1, 1, 1, 1, 5]]) if masked else None
    mask = AttentionMask(document_starts=starts)
    expected, _ = attention_reference(q, k, v, scale=0.3, mask=mask)
    fused, calls = torch.nn.functional.scaled_dot_product_attention, []

    def recorded(q, k, v, tensor, *, is_causal, scale, enable_gqa):
        calls.append((k.shape[1], v.shape[1], tensor is not None, is_causal, enable_gqa))
        return fused(q, k, v, tensor, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", recorded)
    dense = AttentionMask.dense

    def on_cpu(mask, queries, keys, device):
        return dense(mask, queries, keys, torch.device("cpu"))

    monkeypatch.setattr(AttentionMask, "dense", on_cpu)
    out = attention.fused_attention(*(x.as_subclass(OnGpu) for x in (q, k, v)), mask, 0.3)
    assert calls == [(n, n, masked, not masked, False)]
    torch.testing.assert_close(out.as_subclass(torch.Tensor), expected, rtol=1e-13, atol=1e-13)
    calls.clear()
    half = (x.detach().bfloat16().as_subclass(OnGpu) for x in (q, k, v))
    attention.fused_attention(*half, mask, 0.3)
    assert calls[0][:2] == ((n, n) if masked else (groups, groups))
    calls.clear()
    attention.fused_attention(q, k, v, mask, 0.3)  # on a CPU nothing is repeated
    assert calls[0][:2] == (groups, groups)
