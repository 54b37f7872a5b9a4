"""Flash attention against its definition in float64: every option, alone and with others, out, lse
and all gradients.
"""

import pytest
import torch
from checks import assert_as_good, canaries
from megatron.kernels import lang, philox
from megatron.kernels.attention import attention_reference, flash_attention, keep_mask
from megatron.kernels.attention_backward import heads_of_a_program, why_not_atomic
from megatron.kernels.attention_masks import attention_mask
from torch.utils.checkpoint import checkpoint

from megatron.model.dropout import Dropout

KEY = philox.key(7, "attention")


def documents(b, s, *ends):
    """document_starts [b, s]: sample i has its boundaries at `ends`, shifted by i."""
    at = torch.arange(s)
    return torch.stack(
        [
            sum(
                (
                    torch.where(at >= end + i, end + i, 0)
                    - torch.where(at >= end + i, before + i if before else 0, 0)
                )
                for before, end in zip((0, *ends), ends, strict=False)
            )
            + torch.zeros_like(at)
            for i in range(b)
        ]
    )


def zigzag(s, t):
    """Positions of a context-parallel rank: the first and the last s / 2 of t."""
    return torch.cat([torch.arange(s // 2), torch.arange(t - s // 2, t)])


# (s, t, b, n, g, d, dtype, tile, what the mask has, other options): each pair of settings is in
# some row
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CASES = {
    "causal": (120, 120, 1, 1, 1, 64, BF16, 64, {}, {}),
    "odd_gqa": (77, 77, 1, 4, 2, 16, F32, 32, {}, {}),
    "full": (70, 101, 1, 2, 2, 16, F32, 32, {"causal": False}, {}),
    "full_softcap_dropout_d96": (
        64,
        40,
        1,
        2,
        1,
        96,
        BF16,
        32,
        {"causal": False},
        {"softcap": 3.0, "drop": 0.3},
    ),
    "window": (80, 80, 1, 1, 1, 32, F32, 16, {"window": 37}, {}),
    "narrow_window_fewer_keys": (96, 70, 1, 2, 2, 16, F32, 32, {"window": 5}, {"softcap": 2.0}),
    "documents": (100, 100, 2, 1, 1, 16, BF16, 32, {"documents": (3, 40, 80)}, {}),
    "documents_window_dropout": (
        96,
        96,
        2,
        1,
        1,
        32,
        F32,
        32,
        {"documents": (33, 50), "window": 24},
        {"drop": 0.5},
    ),
    "positions": (64, 96, 2, 1, 1, 16, BF16, 32, {"zigzag": True}, {"drop": 0.1}),
    "positions_documents_d96": (
        48,
        96,
        2,
        1,
        1,
        96,
        F32,
        16,
        {"zigzag": True, "documents": (20, 60)},
        {"softcap": 5.0},
    ),
    "positions_window": (64, 96, 1, 2, 1, 32, F16, 32, {"zigzag": True, "window": 40}, {}),
    "s_192": (192, 192, 1, 1, 1, 16, F32, 64, {}, {"drop": 0.2, "softcap": 4.0}),
    "d128": (72, 72, 1, 2, 1, 128, BF16, 64, {"window": 64}, {"drop": 0.1}),
    "d256": (40, 72, 1, 2, 2, 256, BF16, 32, {"causal": False}, {}),
}


def make(name, device, dtype=None):
    """(q, k, v as leaves of one strided buffer's kind, gradients of out and lse, options without
    the mask's tile, tile).
    """
    s, t, b, n, g, d, kind, tile, has, options = CASES[name]
    generator = torch.Generator().manual_seed(len(name) + s)
    # views of a fused projection, as in the model: rows are strided
    draw = lambda length, heads: (
        torch.randn(length, b, heads + 1, d, generator=generator)
        .to(dtype or kind)
        .to(device)[:, :, :heads]
    )  # noqa: E731
    q, k, v, dout = draw(s, n), draw(t, g), draw(t, g), draw(s, n)
    dlse = torch.randn(b, n, s, generator=generator).to(device)
    mask = {key: value for key, value in has.items() if key in ("causal", "window")}
    if "zigzag" in has:
        mask |= {
            "q_positions": zigzag(s, t).to(device),
            "k_positions": torch.arange(t, device=device),
        }
    if "documents" in has:
        starts = documents(b, t, *has["documents"])
        mask["document_starts"] = (starts[:, zigzag(s, t)] if "zigzag" in has else starts).to(
            device
        )
    options = {"scale": d**-0.5, **options}
    if options.get("drop"):
        options |= {
            "key": KEY,
            "sample_ids": torch.tensor([5, 2**31 + 3], device=device)[:b],
            "first_head": 3,
        }
    return (q, k, v), (dout, dlse), (s, t, mask), options, tile


def results(attend, tensors, gradients, mask, **options):
    """[out, lse, dq, dk, dv]."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = attend(*leaves, mask=mask, **options)
    torch.autograd.backward([out, lse], [gradients[0].to(out.dtype), gradients[1].to(lse.dtype)])
    return [out.detach(), lse.detach(), *(x.grad for x in leaves)]


def assert_near(got, want, low):
    """assert_as_good, but in fp32 an error of |lse| (here about 8) roundings is allowed too: the
    backward pass makes p again from lse.
    """
    if got.dtype == torch.float32:
        low = (
            low.double()
            + 4
            * torch.finfo(torch.float32).eps
            * want.abs().nan_to_num(posinf=0).max()
            * (low.double() - want).sign()
        )
    assert_as_good(got, want, low)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.default(
    "causal",
    "odd_gqa",
    "full_softcap_dropout_d96",
    "window",
    "documents_window_dropout",
    "positions",
    "d128",
)
def test_equals_the_definition(device, name):
    tensors, gradients, (s, t, has), options, tile = make(name, device)
    plain = attention_mask(s, t, **has)
    exact = results(attention_reference, [x.double() for x in tensors], gradients, plain, **options)
    torchs = results(attention_reference, tensors, gradients, plain, **options)
    with canaries():
        ours = results(
            flash_attention,
            tensors,
            gradients,
            attention_mask(s, t, **has, tile=tile),
            tile=tile,
            **options,
        )
    for got, want, low in zip(ours, exact, torchs, strict=True):
        assert_near(got, want, low)
    atomically = {"tile": tile, "deterministic": False, **options}
    if why_not_atomic(tensors[0].shape[-1], options.get("softcap"), options.get("drop", 0.0)):
        with pytest.raises(ValueError, match="take --deterministic-mode"):
            flash_attention(*tensors, mask=plain, **atomically)
        return
    atomic = results(
        flash_attention, tensors, gradients, attention_mask(s, t, **has, tile=tile), **atomically
    )
    assert_near(atomic[2], exact[2], torchs[2])
    assert all(torch.equal(a, b) for a, b in zip(atomic, ours, strict=True) if a is not atomic[2])


@pytest.mark.parametrize("d", [64, 128])
def test_shipped_tiles(device, d):
    """192 rows: 64 more than a tile has."""
    generator = torch.Generator().manual_seed(d)
    tensors = [
        torch.randn(192, 1, 1, d, generator=generator).bfloat16().to(device) for _ in range(3)
    ]
    gradients = (
        torch.randn(192, 1, 1, d, generator=generator).bfloat16().to(device),
        torch.randn(1, 1, 192, generator=generator).to(device),
    )
    mask = attention_mask(
        192, 192, document_starts=documents(1, 192, 90).to(device) if d == 64 else None
    )
    exact = results(
        attention_reference, [x.double() for x in tensors], gradients, mask, scale=d**-0.5
    )
    torchs = results(attention_reference, tensors, gradients, mask, scale=d**-0.5)
    ours = results(flash_attention, tensors, gradients, mask, scale=d**-0.5)
    for got, want, low in zip(ours, exact, torchs, strict=True):
        assert_as_good(got, want, low)


def test_rows_that_see_nothing(device):
    tensors, gradients, *_ = make("odd_gqa", device)
    mask = {
        "q_positions": torch.arange(77, device=device),
        "k_positions": torch.arange(20, 97, device=device),
    }
    got = results(
        flash_attention,
        tensors,
        gradients,
        attention_mask(77, 77, **mask, tile=32),
        scale=0.25,
        tile=32,
    )
    exact, torchs = (
        results(
            attention_reference,
            [x.to(kind) for x in tensors],
            gradients,
            attention_mask(77, 77, **mask),
            scale=0.25,
        )
        for kind in (torch.float64, torch.float32)
    )
    for ours, want, low in zip(got, exact, torchs, strict=True):
        assert_near(ours, want, low)
    assert (
        (got[0][:20] == 0).all()
        and (got[1][..., :20] == -torch.inf).all()
        and (got[2][:20] == 0).all()
        and (got[3][57:] == 0).all()
    )


def test_parts_of_the_keys_join_by_lse(device):
    """As ring attention does: later keys apart from earlier ones, which half of the rows do not
    see.
    """
    tensors, gradients, *_ = make("odd_gqa", device)
    at = torch.arange(77, device=device)

    def joined(q, k, v, mask, **options):
        parts = []
        for first, last in ((0, 40), (40, 77)):
            part = attention_mask(
                77, last - first, q_positions=at, k_positions=at[first:last], tile=32
            )
            parts.append(
                flash_attention(q, k[first:last], v[first:last], scale=0.25, mask=part, tile=32)
            )
        outs, lses = zip(*parts, strict=True)
        lse = torch.logaddexp(*lses)
        return sum(
            out * (part - lse).exp().permute(2, 0, 1)[..., None]
            for out, part in zip(outs, lses, strict=True)
        ), lse

    exact, torchs = (
        results(
            attention_reference,
            [x.to(kind) for x in tensors],
            gradients,
            attention_mask(77, 77),
            scale=0.25,
        )
        for kind in (torch.float64, torch.float32)
    )
    for got, want, low in zip(
        results(joined, tensors, gradients, None), exact, torchs, strict=True
    ):
        assert_near(got, want, low)


@pytest.mark.parametrize("logit", [-300.0, 300.0, 20000.0])
@pytest.mark.default("20000.0")
def test_extreme_logits(device, logit):
    """A common part of all scores changes lse, and nothing else."""
    tensors, gradients, (s, t, _), _, tile = make("odd_gqa", device)
    q, k, v = (x.clone() for x in tensors)
    q[..., 0], k[..., 0] = 1.0, logit
    exact = results(
        attention_reference,
        [x.double() for x in (q, k, v)],
        gradients,
        attention_mask(s, t),
        scale=1.0,
    )
    torchs = results(attention_reference, (q, k, v), gradients, attention_mask(s, t), scale=1.0)
    ours = results(
        flash_attention, (q, k, v), gradients, attention_mask(s, t), scale=1.0, tile=tile
    )
    for got, want, low in zip(ours, exact, torchs, strict=True):
        # lse is that exact
        worst, allowed = (
            (got - want).abs().max(),
            abs(logit) * 4 * torch.finfo(torch.float32).eps * want.abs().max(),
        )
        assert got.isfinite().all() and worst <= max(allowed, 2 * (low - want).abs().max()), (
            float(worst),
            float(allowed),
        )


@pytest.mark.parametrize("where", ["q", "k", "dout"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.default("nan-q", "inf-k", "nan-dout")
def test_bad_numbers_stay_in_their_rows(device, where, bad):
    """Nothing is spoilt that the definition does not spoil; out and lse are spoilt just there."""
    (q, k, v), (dout, dlse), (s, t, _), _, tile = make("odd_gqa", device)
    tensors = {"q": q.clone(), "k": k.clone(), "dout": dout.clone()}
    tensors[where][50, 0, 1, 3] = bad
    q, k, dout = tensors.values()
    exact = results(
        attention_reference,
        [x.double() for x in (q, k, v)],
        (dout, dlse),
        attention_mask(s, t),
        scale=0.25,
    )
    ours = results(
        flash_attention, (q, k, v), (dout, dlse), attention_mask(s, t), scale=0.25, tile=tile
    )
    for index, (got, want) in enumerate(zip(ours, exact, strict=True)):
        assert not (want.isfinite() & ~got.isfinite()).any(), index
        assert index > 1 or torch.equal(got.isfinite(), want.isfinite())
    assert where == "dout" or not ours[0].isfinite().all()
    assert ours[2][: 32 if where == "k" else 50].isfinite().all() and not ours[2].isfinite().all()


def test_dropout_mask_is_that_of_the_model(device):
    """With v the identity, out holds the probabilities."""
    site = Dropout(0.4, 11, "layers", 3, "attention.dropout")
    samples, at = torch.tensor([9, 4], device=device), torch.arange(32, 96, device=device)
    q, k = (torch.randn(64, 2, 2, 64, device=device) for _ in range(2))
    v = torch.eye(64, device=device)[:, None, None].expand(64, 2, 2, 64)
    mask = attention_mask(
        64, 64, q_positions=at, k_positions=torch.arange(64, device=device), tile=32
    )
    out, _ = flash_attention(
        q,
        k,
        v,
        scale=0.1,
        mask=mask,
        drop=0.4,
        key=site.key,
        sample_ids=samples,
        first_head=5,
        tile=32,
    )
    kept = keep_mask(site.key, samples, torch.arange(5, 7, device=device), at, 64, 0.4).permute(
        2, 0, 1, 3
    )
    assert torch.equal(out > 0, kept & mask.dense(64, 64, device).permute(2, 0, 1, 3))


@pytest.mark.parametrize("programs", [1, 4])
@pytest.mark.default("4")
def test_a_program_takes_the_heads_that_keep_the_gpu_busy(device, monkeypatch, programs):
    """All four, or two at a time; the other tests are so small that each head has its own
    program.
    """
    assert [heads_of_a_program(24, group, 132) for group in (1, 4, 6, 12)] == [
        1,
        1,
        1,
        2,
    ] and heads_of_a_program(200, 8, 132) == 8
    monkeypatch.setattr(lang, "multiprocessors", lambda _: programs)
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (
        torch.randn(64, 1, heads, 16, generator=generator).to(device) for heads in (4, 1, 1, 4)
    )
    mask, dlse = attention_mask(64, 64), torch.zeros(1, 4, 64, device=device)
    exact, torchs = (
        results(
            attention_reference, [x.to(kind) for x in (q, k, v)], (dout, dlse), mask, scale=0.25
        )
        for kind in (torch.float64, torch.float32)
    )
    for deterministic in (True, False):
        ours = results(
            flash_attention,
            (q, k, v),
            (dout, dlse),
            mask,
            scale=0.25,
            tile=32,
            deterministic=deterministic,
        )
        for got, want, low in zip(ours, exact, torchs, strict=True):
            assert_near(got, want, low)


def test_equal_runs_have_equal_bits(device):
    tensors, gradients, (s, t, has), options, tile = make("positions_window", device)
    first, second = (
        results(
            flash_attention,
            tensors,
            gradients,
            attention_mask(s, t, **has, tile=tile),
            tile=tile,
            **options,
        )
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_definition_by_other_means(device):
    """Written out with einsum, the mask of dropout drawn for one sample and head at a time."""
    (q, k, v), _, (s, t, has), options, _ = make("documents_window_dropout", device)
    q, k, v = (
        q.double().repeat(1, 1, 4, 1),
        k.double().repeat(1, 1, 2, 1),
        v.double().repeat(1, 1, 2, 1),
    )
    out, lse = attention_reference(q, k, v, mask=attention_mask(s, t, **has), **options)
    at = torch.arange(s, device=device)
    distance = at[:, None] - at[None, :]
    see = (
        (distance >= 0)
        & (distance < has["window"])
        & (at[None, None, :] >= has["document_starts"][:, :, None])
    )
    x = (
        torch.einsum("sbgnd,tbgd->bgnst", q.unflatten(2, (2, 2)), k).flatten(1, 2)
        * options["scale"]
    )
    x = torch.where(see[:, None], x, -torch.inf).exp()
    heads = range(options["first_head"], options["first_head"] + x.shape[1])
    keep = torch.stack(
        [
            torch.stack(
                [
                    philox.keep_mask(
                        KEY, [sample.expand(s), torch.full_like(at, head), at], t, options["drop"]
                    )
                    for head in heads
                ]
            )
            for sample in options["sample_ids"]
        ]
    )
    p = x / x.sum(-1, keepdim=True) * keep / (1 - options["drop"])
    want = torch.einsum("bgnst,tbgd->sbgnd", p.unflatten(1, (2, 2)), v).flatten(2, 3)
    assert (out - want).abs().max() < 1e-12 and (lse - x.sum(-1).log()).abs().max() < 1e-12


def test_gradients_of_the_definition():
    q, k, v = (
        torch.randn(5, 1, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    at = torch.arange(5)
    options = {
        "scale": 0.7,
        "softcap": 2.0,
        "drop": 0.3,
        "key": KEY,
        "sample_ids": torch.tensor([1]),
    }
    for mask in (
        attention_mask(5, 5, window=3),
        attention_mask(5, 5, q_positions=at, k_positions=at + 1),
    ):

        def attend(*x, mask=mask):
            out, lse = attention_reference(*x, mask=mask, **options)
            return out, lse.masked_fill(lse == -torch.inf, 0)

        assert torch.autograd.gradcheck(attend, (q, k, v))


class TestOps:
    """As torch sees them."""

    @pytest.fixture
    def call(self, device):
        tensors, _, (s, t, has), options, _ = make("narrow_window_fewer_keys", device)
        mask = attention_mask(s, t, **has)

        def attend(q, k, v):
            return flash_attention(q, k, v, mask=mask, tile=32, **options)

        return attend, tensors

    def test_opcheck(self, device):
        tensors, (dout, dlse), (s, t, has), options, tile = make("documents_window_dropout", device)
        tensors, dout, dlse = (
            [x[:40, :1] for x in tensors],
            dout[:40, :1],
            dlse[:1, :, :40].contiguous(),
        )
        mask = attention_mask(
            40, 40, window=has["window"], document_starts=has["document_starts"][:1, :40], tile=tile
        )
        rest = (
            0.2,
            None,
            True,
            mask.window,
            None,
            None,
            mask.document_starts,
            mask.by_query,
            mask.by_key,
            0.5,
            list(KEY),
            options["sample_ids"][:1],
            3,
            True,
            tile,
            False,
        )
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        torch.library.opcheck(torch.ops.megatron.flash_attention.default, (leaves, *rest))
        out, lse = torch.ops.megatron.flash_attention(tensors, *rest)
        torch.library.opcheck(
            torch.ops.megatron.flash_attention_backward.default,
            (dout, dlse, out, lse, tensors, *rest),
        )

    def gradients(self, attend, tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse = attend(*leaves)
        (out.square().sum() + lse.sin().sum()).backward()
        return [x.grad for x in leaves]

    def test_under_checkpoint_and_compile(self, call):
        attend, tensors = call
        plain = self.gradients(attend, tensors)
        wrapped = (
            lambda *x: checkpoint(attend, *x, use_reentrant=False),
            torch.compile(attend, fullgraph=True, backend="aot_eager"),
        )
        for other in wrapped:
            assert all(
                torch.equal(a, b)
                for a, b in zip(plain, self.gradients(other, tensors), strict=True)
            )

    def test_torch_library_differentiates_inside_compile_alone(self, call):
        """Its function of autograd costs the host 0.1 ms a call, and the registered operator of a
        compiled graph has no other.
        """
        attend, tensors = call
        out, lse = attend(*[x.detach().requires_grad_() for x in tensors])
        assert out.grad_fn is lse.grad_fn and "FlashAttention" in out.grad_fn.name()
        assert "Generated" not in out.grad_fn.name()
        graphs = []

        def backend(graph, _inputs):
            graphs.append(graph)
            return graph

        torch.compile(attend, fullgraph=True, backend=backend)(*tensors)
        called = {node.target for graph in graphs for node in graph.graph.nodes}
        assert called & {
            torch.ops.megatron.flash_attention,
            torch.ops.megatron.flash_attention.default,
        }

    def test_gradient_of_one_output(self, call):
        """Of out alone, expanded from one number; of lse alone."""
        attend, tensors = call
        for index in (0, 1):
            leaves, exact = (
                [x.detach().to(kind).requires_grad_() for x in tensors]
                for kind in (torch.float32, torch.float64)
            )
            attend(*leaves)[index].sum().backward()
            attention_reference(
                *exact, mask=attention_mask(96, 70, window=5), scale=0.25, softcap=2.0
            )[index].nan_to_num(neginf=0).sum().backward()
            for ours, want in zip(leaves, exact, strict=True):
                assert (ours.grad - (0 if want.grad is None else want.grad)).abs().max() < 1e-5

    def test_what_no_descriptor_can_address_is_copied(self, call):
        attend, tensors = call
        odd = [torch.empty(x.numel() + 1, device=x.device)[1:].view_as(x).copy_(x) for x in tensors]
        turned = [x.transpose(0, 3).contiguous().transpose(0, 3) for x in tensors]
        want = attend(*tensors)[0]
        assert torch.equal(attend(*odd)[0], want) and torch.equal(attend(*turned)[0], want)
