"""Flash attention against its definition in float64: every option, alone and with others, out, lse
and all gradients; by descriptors, and by pointers as on GPUs older than Hopper.
"""

import pytest
import torch
from checks import assert_as_good, canaries
from megatron.kernels import attention_launch, lang, philox
from megatron.kernels.attention import attention_reference, flash_attention
from megatron.kernels.attention_backward import heads_of_a_program, unsupported_atomics
from megatron.kernels.attention_masks import attention_mask
from selection import each_value
from torch.utils.checkpoint import checkpoint

KEY = philox.key(7, "attention")


def documents(b, s, *ends):
    """document_starts [b, s]: sample i has its boundaries at `ends`, shifted by i."""
    at, shift = torch.arange(s), torch.arange(b)[:, None]
    starts = torch.zeros(b, s, dtype=torch.int64)
    for end in ends:
        starts = torch.where(at >= end + shift, end + shift, starts)
    return starts


def zigzag(s, t):
    """Positions of a context-parallel rank: the first and the last s / 2 of t."""
    return torch.cat([torch.arange(s // 2), torch.arange(t - s // 2, t)])


# (s, t, b, n, g, d, dtype, tile, what the mask has, other options): each pair of settings is in
# some row
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FULL, CAPPED = {"causal": False}, {"softcap": 3.0, "drop": 0.3}
DOCUMENTS = {"documents": (33, 50), "window": 24}
CASES = {
    "causal": (120, 120, 1, 1, 1, 64, BF16, 64, {}, {}),
    "odd_gqa": (45, 45, 1, 4, 2, 16, F32, 32, {}, {}),
    "full": (70, 101, 1, 2, 2, 16, F32, 32, FULL, {}),
    "full_softcap_dropout_d96": (40, 24, 1, 2, 1, 96, BF16, 32, FULL, CAPPED),
    "window": (80, 80, 1, 1, 1, 32, F32, 16, {"window": 37}, {}),
    "narrow_window_fewer_keys": (96, 70, 1, 2, 2, 16, F32, 32, {"window": 5}, {"softcap": 2.0}),
    "documents": (100, 100, 2, 1, 1, 16, BF16, 32, {"documents": (3, 40, 80)}, {}),
    "documents_window_dropout": (60, 60, 2, 1, 1, 32, F32, 32, DOCUMENTS, {"drop": 0.5}),
    "positions": (64, 96, 1, 1, 1, 16, BF16, 32, {"zigzag": True}, {"drop": 0.1}),
    "positions_documents_d96": (
        *(48, 96, 2, 1, 1, 96, F32, 16),
        {"zigzag": True, "documents": (20, 60)},
        {"softcap": 5.0},
    ),
    "positions_window": (64, 96, 1, 2, 1, 32, F16, 32, {"zigzag": True, "window": 40}, {}),
    "s_192": (192, 192, 1, 1, 1, 16, F32, 64, {}, {"drop": 0.2, "softcap": 4.0}),
    "d128": (72, 72, 1, 2, 1, 128, BF16, 64, {"window": 64}, {"drop": 0.1}),
    "d256": (40, 72, 1, 2, 2, 256, BF16, 32, FULL, {}),
}


def make(name, device):
    """(q, k, v, gradients of out and lse, what the mask has with its sizes, options, tile)."""
    s, t, b, n, g, d, kind, tile, has, options = CASES[name]
    generator = torch.Generator().manual_seed(len(name) + s)
    # views of a fused projection, as in the model: rows are strided
    q, k, v, dout = (
        torch.randn(length, b, heads + 1, d, generator=generator).to(device, kind)[:, :, :heads]
        for length, heads in ((s, n), (t, g), (t, g), (s, n))
    )
    dlse = torch.randn(b, n, s, generator=generator).to(device)
    mask = {key: value for key, value in has.items() if key in ("causal", "window")}
    if "zigzag" in has:
        mask["q_positions"] = zigzag(s, t).to(device)
        mask["k_positions"] = torch.arange(t, device=device)
    if "documents" in has:
        starts = documents(b, t, *has["documents"])
        starts = starts[:, zigzag(s, t)] if "zigzag" in has else starts
        mask["document_starts"] = starts.to(device)
    options = {"scale": d**-0.5, **options}
    if options.get("drop"):
        samples = torch.tensor([5, 2**31 + 3], device=device)[:b]
        options |= {"key": KEY, "sample_ids": samples, "first_head": 3}
    return (q, k, v), (dout, dlse), (s, t, mask), options, tile


def results(attend, tensors, gradients, mask, **options):
    """[out, lse, dq, dk, dv]."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = attend(*leaves, mask=mask, **options)
    torch.autograd.backward([out, lse], [gradients[0].to(out.dtype), gradients[1].to(lse.dtype)])
    return [out.detach(), lse.detach(), *(x.grad for x in leaves)]


def defined(tensors, gradients, mask, **options):
    """The definition's results in float64 and in the precision of the tensors."""
    return [
        results(attention_reference, [x.to(kind) for x in tensors], gradients, mask, **options)
        for kind in (torch.float64, tensors[0].dtype)
    ]


def assert_near(got, want, low):
    """assert_as_good, but in fp32 an error of |lse| (here about 8) roundings is allowed too: the
    backward pass makes p again from lse.
    """
    if got.dtype == torch.float32:
        most = want.abs().nan_to_num(posinf=0).max()
        roundings = 4 * torch.finfo(torch.float32).eps * most
        low = low.double() + roundings * (low.double() - want).sign()
    assert_as_good(got, want, low)


def assert_all_near(ours, exact, torchs):
    for got, want, low in zip(ours, exact, torchs, strict=True):
        assert_near(got, want, low)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.default("odd_gqa", "full_softcap_dropout_d96", "documents_window_dropout", "positions")
def test_equals_the_definition(device, name, monkeypatch):
    """Deterministic, with atomic sums, and by pointers."""
    tensors, gradients, (s, t, has), options, tile = make(name, device)
    exact, torchs = defined(tensors, gradients, attention_mask(s, t, **has), **options)
    mask, options = attention_mask(s, t, **has, tile=tile), {"tile": tile, **options}
    with canaries():
        ours = results(flash_attention, tensors, gradients, mask, **options)
    assert_all_near(ours, exact, torchs)
    options["deterministic"] = False
    if unsupported_atomics(tensors[0].shape[-1], options.get("softcap"), options.get("drop", 0.0)):
        with pytest.raises(ValueError, match="take --deterministic-mode"):
            flash_attention(*tensors, mask=mask, **options)
    else:
        atomic = results(flash_attention, tensors, gradients, mask, **options)
        assert_near(atomic[2], exact[2], torchs[2])
        others = [a for at, a in enumerate(atomic) if at != 2], [*ours[:2], *ours[3:]]
        assert all(torch.equal(a, b) for a, b in zip(*others, strict=True))
    if name not in ("odd_gqa", "full_softcap_dropout_d96"):
        return
    # Rows and columns beyond the last, strided views, dropout; in the interpreter the same bits.
    monkeypatch.setattr(lang, "capability", lambda _: 80)
    monkeypatch.setattr(attention_launch, "descriptor", None)
    options["deterministic"] = True
    with canaries():
        pointers = results(flash_attention, tensors, gradients, mask, **options)
    assert_all_near(pointers, exact, torchs)
    if device.type == "cpu":
        assert all(torch.equal(a, b) for a, b in zip(pointers, ours, strict=True))


@pytest.mark.parametrize("arch, d", [(90, 64), (90, 128), (80, 64), (80, 128)])
@pytest.mark.default("90-128", "80-64")
def test_shipped_tiles(device, monkeypatch, arch, d):
    """Some rows more than a tile has."""
    if device.type == "cpu" or arch == 80:
        monkeypatch.setattr(lang, "capability", lambda _: arch)
    rows, generator = 136 if arch == 80 else 192, torch.Generator().manual_seed(d)
    *tensors, dout = (
        torch.randn(rows, 1, 1, d, generator=generator).bfloat16().to(device) for _ in range(4)
    )
    dlse = torch.randn(1, 1, rows, generator=generator).to(device)
    starts = documents(1, rows, 90).to(device) if d == 64 else None
    mask, scale = attention_mask(rows, rows, document_starts=starts), d**-0.5
    exact, torchs = defined(tensors, (dout, dlse), mask, scale=scale)
    ours = results(flash_attention, tensors, (dout, dlse), mask, scale=scale)
    for got, want, low in zip(ours, exact, torchs, strict=True):
        assert_as_good(got, want, low)
    if arch == 80:
        with pytest.raises(ValueError, match="compute capability 8.0"):
            flash_attention(*tensors, mask=mask, scale=scale, deterministic=False)


def test_rows_that_see_nothing(device):
    tensors, gradients, (s, _, _), _, tile = make("odd_gqa", device)
    at = torch.arange(s, device=device)
    given = {"q_positions": at, "k_positions": at + 20}
    exact, torchs = defined(tensors, gradients, attention_mask(s, s, **given), scale=0.25)
    mask = attention_mask(s, s, **given, tile=tile)
    out, lse, dq, dk, dv = results(flash_attention, tensors, gradients, mask, scale=0.25, tile=tile)
    assert_all_near((out, lse, dq, dk, dv), exact, torchs)
    assert (out[:20] == 0).all() and (lse[..., :20] == -torch.inf).all()
    assert (dq[:20] == 0).all() and (dk[s - 20 :] == 0).all()


@pytest.mark.parametrize("logit", [-300.0, 300.0, 20000.0])
@pytest.mark.default("20000.0")
def test_extreme_logits(device, logit):
    """A common part of all scores changes lse, and nothing else."""
    tensors, gradients, (s, t, _), _, tile = make("odd_gqa", device)
    q, k, v = (x.clone() for x in tensors)
    q[..., 0], k[..., 0], mask = 1.0, logit, attention_mask(s, t)
    exact, torchs = defined((q, k, v), gradients, mask, scale=1.0)
    ours = results(flash_attention, (q, k, v), gradients, mask, scale=1.0, tile=tile)
    for got, want, low in zip(ours, exact, torchs, strict=True):
        # lse is that exact
        allowed = abs(logit) * 4 * torch.finfo(torch.float32).eps * want.abs().max()
        worst = (got - want).abs().max()
        assert got.isfinite().all() and worst <= max(allowed, 2 * (low - want).abs().max())


@pytest.mark.parametrize("where", ["q", "k", "dout"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.default("inf-k", "nan-dout")
def test_bad_numbers_stay_in_their_rows(device, where, bad):
    """Nothing is spoilt that the definition does not spoil; out and lse are spoilt just there."""
    (q, k, v), (dout, dlse), (s, t, _), _, tile = make("odd_gqa", device)
    tensors, mask = {"q": q.clone(), "k": k.clone(), "dout": dout.clone()}, attention_mask(s, t)
    tensors[where][40, 0, 1, 3] = bad
    q, k, dout = tensors.values()
    exact, _ = defined((q, k, v), (dout, dlse), mask, scale=0.25)
    ours = results(flash_attention, (q, k, v), (dout, dlse), mask, scale=0.25, tile=tile)
    for index, (got, want) in enumerate(zip(ours, exact, strict=True)):
        assert not (want.isfinite() & ~got.isfinite()).any(), index
        assert index > 1 or torch.equal(got.isfinite(), want.isfinite())
    assert where == "dout" or not ours[0].isfinite().all()
    assert ours[2][: 32 if where == "k" else 40].isfinite().all() and not ours[2].isfinite().all()


def test_a_program_takes_the_heads_that_keep_the_gpu_busy(device, monkeypatch):
    """Two of four at a time; the other tests are so small that each head has its own program."""
    assert [heads_of_a_program(24, group, 132) for group in (1, 4, 6, 12)] == [1, 1, 1, 2]
    assert heads_of_a_program(200, 8, 132) == 8
    monkeypatch.setattr(lang, "multiprocessors", lambda _: 4)
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (
        torch.randn(64, 1, heads, 16, generator=generator).to(device) for heads in (4, 1, 1, 4)
    )
    mask, dlse = attention_mask(64, 64), torch.zeros(1, 4, 64, device=device)
    exact, torchs = defined((q, k, v), (dout, dlse), mask, scale=0.25)
    for deterministic in (True, False):
        given = {"scale": 0.25, "tile": 32, "deterministic": deterministic}
        ours = results(flash_attention, (q, k, v), (dout, dlse), mask, **given)
        assert_all_near(ours, exact, torchs)


class TestOps:
    """As torch sees them."""

    @pytest.fixture
    def call(self, device):
        tensors, *_ = make("narrow_window_fewer_keys", device)
        mask = attention_mask(24, 20, window=5)

        def attend(q, k, v):
            return flash_attention(q, k, v, mask=mask, tile=16, scale=0.25, softcap=2.0)

        return attend, [x[:length] for x, length in zip(tensors, (24, 20, 20), strict=True)], mask

    def gradients(self, attend, tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse = attend(*leaves)
        (out.square().sum() + lse.sin().sum()).backward()
        return [x.grad for x in leaves]

    def test_under_checkpoint_and_compile(self, call):
        """torch.library's own function of autograd costs the host 0.1 ms a call: a compiled graph
        alone has it.
        """
        attend, tensors, _ = call
        plain = self.gradients(attend, tensors)
        out, lse = attend(*[x.detach().requires_grad_() for x in tensors])
        assert out.grad_fn is lse.grad_fn and "FlashAttention" in out.grad_fn.name()
        assert "Generated" not in out.grad_fn.name()
        for other in (
            lambda *x: checkpoint(attend, *x, use_reentrant=False),
            torch.compile(attend, fullgraph=True, backend="aot_eager"),
        ):
            found = self.gradients(other, tensors)
            assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))

    def test_gradient_of_one_output(self, call):
        """Of out alone, expanded from one number; of lse alone."""
        attend, tensors, mask = call
        for index in (0, 1):
            leaves, exact = (
                [x.detach().to(kind).requires_grad_() for x in tensors]
                for kind in (torch.float32, torch.float64)
            )
            attend(*leaves)[index].sum().backward()
            wide = attention_reference(*exact, mask=mask, scale=0.25, softcap=2.0)[index]
            wide.nan_to_num(neginf=0).sum().backward()
            for ours, want in zip(leaves, exact, strict=True):
                assert (ours.grad - (0 if want.grad is None else want.grad)).abs().max() < 1e-5

    def test_what_no_descriptor_can_address_is_copied(self, call):
        attend, tensors, _ = call
        odd = [torch.empty(x.numel() + 1, device=x.device)[1:].view_as(x).copy_(x) for x in tensors]
        turned = [x.transpose(0, 3).contiguous().transpose(0, 3) for x in tensors]
        want = attend(*tensors)[0]
        assert torch.equal(attend(*odd)[0], want) and torch.equal(attend(*turned)[0], want)


def split(qkv):
    q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
    return q.flatten(2, 3), k, v


@pytest.mark.parametrize("g, m", [(2, 1), (2, 2), (3, 4), (1, 4)])  # key heads, queries of each
@pytest.mark.parametrize("programs", [1, 12])
@pytest.mark.table(traits=each_value)
@pytest.mark.default("1-2-2")
def test_fused_projections_give_the_bits_of_their_parts(device, monkeypatch, g, m, programs):
    """Where one program takes all heads of a key and where it takes some; dk and dv are the fused
    gradient's own.
    """
    monkeypatch.setattr(lang, "multiprocessors", lambda _: programs)
    s, b, options = 24, 1, {"scale": 0.25, "tile": 16}
    generator = torch.Generator().manual_seed(g + m)
    qkv, dout = (
        torch.randn(s, b, *heads, 16, generator=generator).to(device)
        for heads in ((g, m + 2), (g * m,))
    )
    given = (dout, torch.randn(b, g * m, s, generator=generator).to(device)), attention_mask(s, s)
    apart = results(flash_attention, [x.contiguous() for x in split(qkv)], *given, **options)
    exact, torchs = defined(split(qkv), *given, scale=0.25)
    with canaries():
        out, lse, of_qkv = results(flash_attention, [qkv], *given, **options)
    dq, dk, dv = split(of_qkv)
    assert of_qkv.is_contiguous()
    for got, want, low, part in zip((out, lse, dq, dk, dv), exact, torchs, apart, strict=True):
        assert_near(got, want, low)
        assert torch.equal(got, part)
