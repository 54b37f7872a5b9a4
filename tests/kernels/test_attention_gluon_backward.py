"""The backward pass in Gluon against the definition in float64, in many orders of events
(gluon_interpreter.py), and that its faults would be found.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from checks import Allocations, assert_as_good, canaries
from gluon_cases import make
from gluon_interpreter import Fault, Interpreted
from megatron.kernels import attention, attention_gluon, attention_gluon_backward, lang
from megatron.kernels.attention import attention_reference, flash_attention
from megatron.kernels.attention_gluon_backward import backward, dkv_kernel, dq_kernel
from megatron.kernels.attention_launch import Options
from megatron.kernels.attention_masks import attention_mask

pytestmark = [
    pytest.mark.skipif(attention_gluon.gluon is None, reason="this Triton has no Gluon"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_attention_gluon.py runs compiled"),
]
BF16, F16 = torch.bfloat16, torch.float16
# (s, t, b, query heads, key heads, d, dtype, what the mask has, processors of the GPU): lengths are
# odd, whole tiles, or end within the first consumer's rows; with many processors a key head's query
# heads are split over programs
CASES = {
    "causal_gqa": (320, 320, 1, 4, 2, 128, BF16, {}, 3),
    "causal_gqa_in_parts": (150, 150, 1, 4, 1, 64, F16, {}, 132),
    "full_odd": (77, 333, 2, 2, 1, 64, BF16, {"causal": False}, 2),
    "full_whole_blocks": (256, 256, 1, 2, 2, 128, F16, {"causal": False}, 2),
    "causal_more_queries": (300, 130, 1, 1, 1, 96, F16, {}, 1),
    "causal_keys_that_nobody_sees": (64, 300, 1, 2, 2, 40, BF16, {}, 132),
    "window": (448, 448, 1, 1, 1, 64, BF16, {"window": 150}, 2),
    "narrow_window_fewer_keys": (400, 200, 1, 1, 1, 64, F16, {"window": 5}, 1),
    "documents": (384, 384, 2, 1, 1, 64, BF16, {"documents": (3, 200)}, 2),
    "documents_window": (200, 200, 2, 2, 1, 128, BF16, {"documents": (130,), "window": 60}, 1),
}
QUICK = ("causal_gqa_in_parts", "full_odd", "causal_keys_that_nobody_sees", "documents_window")
CHOSEN = [pytest.param(name, marks=() if name in QUICK else pytest.mark.campaign) for name in CASES]


@pytest.fixture
def interpreted(monkeypatch):
    """`interpreted(processors, seed)`: from now on launches run on the CPU."""

    def use(processors: int, seed: int = 0, **changes: dict[str, str]) -> None:
        monkeypatch.setattr(lang, "multiprocessors", lambda _: processors)
        for name, kernel in (("dkv", dkv_kernel), ("dq", dq_kernel)):
            monkeypatch.setattr(
                attention_gluon_backward,
                f"{name}_kernel",
                Interpreted(kernel, seed, changes.get(name)),
            )

    return use


def defined(qkv, scale, mask, dout, dlse):
    """(out, lse, gradients) of the definition in the precision of qkv."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    out, lse = attention_reference(*leaves, scale=scale, mask=mask)
    seen = lse.isfinite()
    total = (out * dout.to(out.dtype)).sum() + (lse[seen] * dlse.to(lse.dtype)[seen]).sum()
    return out.detach(), lse.detach(), torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("name", CHOSEN)
def test_equals_the_definition(interpreted, name):
    q, k, v, mask, processors = make(CASES[name])
    scale, generator = q.shape[-1] ** -0.5, torch.Generator().manual_seed(1)
    dout = torch.randn(q.shape, generator=generator).to(q.dtype)
    dlse = torch.randn(q.shape[1], q.shape[2], len(q), generator=generator)
    exact = defined([x.double() for x in (q, k, v)], scale, mask, dout, dlse)
    torchs = defined((q, k, v), scale, mask, dout, dlse)
    out, lse = exact[0].to(q.dtype), exact[1].float()
    results = []
    for seed in range(2):
        interpreted(processors, seed)
        with canaries():
            results.append(backward(dout, dlse, out, lse, (q, k, v), mask, Options(scale)))
    for ours, want, low in zip(results[0], exact[2], torchs[2], strict=True):
        assert_as_good(ours, want, low)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def example(s, m=2, d=64, seed=0):
    """(fused projection [s, 1, 2, m + 2, d], its parts, dout, out, lse) of causal attention."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(s, 1, 2, m + 2, d, generator=generator).bfloat16()
    q, k, v = fused.split((m, 1, 1), 3)
    parts = q.reshape(s, 1, 2 * m, d), k.squeeze(3), v.squeeze(3)
    dout = torch.randn(parts[0].shape, generator=generator).bfloat16()
    out, lse = attention_reference(*parts, scale=0.1, mask=attention_mask(s, s))
    return fused, parts, dout, out, lse.float()


def test_the_fused_projection_is_read_where_it_lies(interpreted, monkeypatch):
    """Its gradient is written whole, has the same bits as that of its parts, and nothing is
    copied.
    """
    fused, parts, dout, out, lse = example(s=70)
    mask, options = attention_mask(70, 70), Options(0.1)
    interpreted(3)
    apart = backward(dout, None, out, lse, parts, mask, options)
    allocations = Allocations()
    with allocations:
        (whole,) = backward(dout, None, out, lse, (fused,), mask, options)
    q, k, v = whole.split((2, 1, 1), 3)
    for a, b in zip(apart, (q.reshape(apart[0].shape), k.squeeze(3), v.squeeze(3)), strict=True):
        assert torch.equal(a, b)
    large = [name for name, count in allocations.seen if count >= fused.numel()]
    assert large == ["empty"]


@pytest.mark.parametrize(
    "stages", [2, *(pytest.param(x, marks=pytest.mark.campaign) for x in (3, 4))]
)
def test_order_does_not_matter(interpreted, monkeypatch, stages):
    """In orders that starve one partition or another, or the copies."""
    fused, _, dout, out, lse = example(s=180)
    shipped = attention_gluon_backward.configuration
    monkeypatch.setattr(
        attention_gluon_backward,
        "configuration",
        lambda kernel, d: replace(shipped(kernel, d), stages=stages),
    )
    found = []
    for seed in range(5):
        interpreted(2, seed)
        mask, options = attention_mask(180, 180), Options(0.1)
        found += backward(dout, None, out, lse, (fused,), mask, options)
    assert all(torch.equal(other, found[0]) for other in found[1:])


def test_the_operator_takes_both_passes_in_gluon(interpreted, monkeypatch):
    """Also where the Triton kernels would add up dq atomically."""
    q, k, v, mask, _ = make(CASES["narrow_window_fewer_keys"])
    interpreted(2)
    forward = attention_gluon.forward_kernel
    monkeypatch.setattr(attention_gluon, "forward_kernel", Interpreted(forward))
    monkeypatch.setattr(attention, "backward", None)
    x = [each[:70].detach().requires_grad_() for each in (q, k, v)]
    mask = attention_mask(70, 70, window=5)
    out, lse = flash_attention(*x, scale=0.1, mask=mask, gluon=True, deterministic=False)
    (out.float().sin().sum() + lse.sum()).backward()
    y = [each[:70].double().requires_grad_() for each in (q, k, v)]
    out, lse = attention_reference(*y, scale=0.1, mask=mask)
    (out.sin().sum() + lse.sum()).backward()
    for ours, exact in zip(x, y, strict=True):
        assert (ours.grad.double() - exact.grad).norm() < 5e-3 * exact.grad.norm()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_numbers_stay_where_they_belong(interpreted, bad):
    """dout of one row reaches the keys that the row sees, and masked keys reach nothing."""
    (s, t), scale = (40, 260), 0.1
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(s, 1, 1, 64, generator=generator).bfloat16()
    k, v = (torch.randn(t, 1, 1, 64, generator=generator).bfloat16() for _ in range(2))
    k[200], v[201] = bad, bad  # in a fully masked block of keys
    mask = attention_mask(s, t)
    out, lse = attention_reference(q, k[:s], v[:s], scale=scale, mask=attention_mask(s, s))
    dout = torch.randn(q.shape, generator=generator).bfloat16()
    interpreted(1)
    dq, dk, dv = backward(dout, None, out, lse, (q, k, v), mask, Options(scale))
    assert dq.isfinite().all() and (dk[s:] == 0).all() and (dv[s:] == 0).all()
    dout[20, 0, 0, 3] = bad
    dq, dk, dv = backward(dout, None, out, lse, (q, k, v), mask, Options(scale))
    for x, rows in ((dq, [20]), (dk, list(range(21)))):
        assert (~x.isfinite().all(-1)).flatten().nonzero().flatten().tolist() == rows
    assert dv[..., 4:].isfinite().all() and not dv[:21, ..., 3].isfinite().any()


# kernel, what is changed in its source, what into, and what must be said about it
MUTANTS = {
    "held operands are not waited for": (
        "both",
        "    mbarrier.wait(held_full.index(0), 0)\n",
        "",
        "is read",
    ),
    "q and dout are not waited for": (
        "dkv",
        "    mbarrier.wait(full.index(slot), count // STAGES & 1)\n",
        "",
        "is read",
    ),
    "the first k and v are not waited for": (
        "dq",
        "    mbarrier.wait(full.index(0), 0)\n",
        "",
        "is read",
    ),
    "k and v are not waited for": (
        "dq",
        "        mbarrier.wait(full.index(slot), step // STAGES & 1)\n",
        "",
        "is read",
    ),
    "the phase of full does not change": (
        "dkv",
        "full.index(slot), count // STAGES & 1",
        "full.index(slot), 0",
        "is read|deadlock",
    ),
    "the phase of full does not change in dq": (
        "dq",
        "full.index(slot), step // STAGES & 1",
        "full.index(slot), 0",
        "is read|deadlock|is written, and a read",
    ),
    "the producer does not wait": (
        "both",
        "mbarrier.wait(empty.index(each * STAGES + slot), (count // STAGES & 1) ^ 1)",
        "pass",
        "is written, and a read",
    ),
    "the producer's phase is wrong": (
        "both",
        "(count // STAGES & 1) ^ 1)",
        "count // STAGES & 1)",
        "deadlock",
    ),
    "buffers are not released": (
        "both",
        "        release(empty.index(before))\n",
        "",
        "deadlock",
    ),
    "the wrong buffer is released": (
        "both",
        "        release(empty.index(before))\n",
        "        release(empty.index(slot))\n",
        "is written, and a read|deadlock|arrivals",
    ),
    "k is released before dq's product": (
        "dq",
        (
            "        x, dq = warpgroup_mma_wait(0, deps=[x, dq])\n"
            "        dp = product_with(dout_tile, v_ring.index(slot).reshape([N, D]), X)\n"
            "        release(empty.index(before))\n"
        ),
        (
            "        release(empty.index(before))\n"
            "        x, dq = warpgroup_mma_wait(0, deps=[x, dq])\n"
            "        dp = product_with(dout_tile, v_ring.index(slot).reshape([N, D]), X)\n"
        ),
        "is written, and a read",
    ),
    "warps do not meet before a release": (
        "both",
        "    gl.thread_barrier()\n    mbarrier.expect(empty, 0)\n",
        "    mbarrier.expect(empty, 0)\n",
        "is written, and a read|a phase ends",
    ),
    "one consumer is enough": (
        "both",
        "make_barriers(STAGES, PARTS)",
        "make_barriers(STAGES, 1)",
        "is written|arrivals|is read|deadlock",
    ),
    "dk takes q of another block": (
        "dkv",
        "dk = add_product(dk, ds, q_ring.index(before)",
        "dk = add_product(dk, ds, q_ring.index((count + 1) % STAGES)",
        "is read|is written",
    ),
    "dq takes k of another block": (
        "dq",
        "dq = add_product(dq, ds, k_ring.index(before)",
        "dq = add_product(dq, ds, k_ring.index((step + 1) % STAGES)",
        "is read|is written",
    ),
    "a buffer beyond the ring": (
        "dkv",
        "return q_ring.index(slot).reshape([M, D])",
        "return q_ring.index(count).reshape([M, D])",
        "buffer 3 of 3",
    ),
    "a wait for too little before the exponentials": (
        "dkv",
        "x, dk = warpgroup_mma_wait(1, deps=[x, dk])",
        "x, dk = warpgroup_mma_wait(2, deps=[x, dk])",
        "before it was waited for",
    ),
    "scores are not waited for in dq": (
        "dq",
        "x, dq = warpgroup_mma_wait(0, deps=[x, dq])",
        "x, dq = warpgroup_mma_wait(1, deps=[x, dq])",
        "before it was waited for",
    ),
    "dP is not waited for": (
        "dkv",
        "        dp = warpgroup_mma_wait(1, deps=[dp])\n",
        "",
        "before it was waited for",
    ),
    "dP is not waited for in dq": (
        "dq",
        "        dp = warpgroup_mma_wait(0, deps=[dp])\n",
        "",
        "before it was waited for",
    ),
    "dv is not waited for": (
        "dkv",
        "        dv = warpgroup_mma_wait(0, deps=[dv])\n",
        "",
        "before it was waited for|a product",
    ),
    "lse of another block": (
        "dkv",
        "base_ring.index(slot).load(X)",
        "base_ring.index((slot + 1) % STAGES).load(X)",
        "is read|is written",
    ),
    "delta of another block": (
        "dkv",
        "delta_ring.index(slot).load(X)",
        "delta_ring.index((slot + 1) % STAGES).load(X)",
        "is read|is written",
    ),
    "too few bytes for a block of the ring": (
        "both",
        "mbarrier.expect(full.index(slot), size)",
        "mbarrier.expect(full.index(slot), size // 2)",
        "deadlock|is read",
    ),
    "bytes of lse and delta are forgotten": (
        "dkv",
        "2 * q.block_type.nbytes + 2 * base.block_type.nbytes",
        "2 * q.block_type.nbytes",
        "deadlock|is read",
    ),
    "too few bytes for held operands": (
        "both",
        "2 * PARTS * first.block_type.nbytes",
        "PARTS * first.block_type.nbytes",
        "deadlock|is read",
    ),
    "no fence before the store": ("both", "    fence_async_shared()\n", "", "has no fence"),
    "dk is written before dv has been stored": (
        "dkv",
        "    tma.store_wait(0)\n    tile",
        "    tile",
        "is written, and a read",
    ),
    "the last store is not waited for": (
        "dq",
        "    store_rows(dq, out_tiles.index(PART), total * scale, place)\n    tma.store_wait(0)\n",
        "    store_rows(dq, out_tiles.index(PART), total * scale, place)\n",
        "before a store",
    ),
    "both consumers store the same rows": (
        "both",
        "+= PART * R",
        "+= 0 * R",
        "written twice",
    ),
}


@pytest.fixture(scope="module")
def job():
    """Eight blocks of queries of two heads by three of keys, for rings of three buffers."""
    s, t, generator = 500, 300, torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(length, 1, heads, 16, generator=generator).bfloat16()
        for length, heads in ((s, 2), (t, 1), (t, 1))
    )
    mask = attention_mask(s, t, causal=False)
    out, lse = attention_reference(q, k, v, scale=0.1, mask=mask)
    return torch.ones_like(out), None, out, lse, (q, k, v), mask, Options(0.1)


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.default(
    "held operands are not waited for",
    "the phase of full does not change",
    "the producer does not wait",
    "buffers are not released",
    "dk takes q of another block",
    "dv is not waited for",
    "no fence before the store",
    "too few bytes for a block of the ring",
)
def test_mutants_are_found(interpreted, monkeypatch, job, name):
    """In whatever order things happen."""
    which, old, new, message = MUTANTS[name]
    layout = replace(attention_gluon_backward.configuration("dkv", 64), stages=3)
    monkeypatch.setattr(
        attention_gluon_backward,
        "configuration",
        lambda kernel, d: layout,
    )
    for kernel in ("dkv", "dq") if which == "both" else (which,):
        other = "dq" if kernel == "dkv" else "dkv"
        for seed in range(2):
            interpreted(4, seed, **{kernel: {old: new}})
            monkeypatch.setattr(attention_gluon_backward, f"_launch_{other}", lambda *_: None)
            with pytest.raises(Fault, match=message):
                backward(*job)
        monkeypatch.undo()
        monkeypatch.setattr(attention_gluon_backward, "configuration", lambda kernel, d: layout)


def test_the_gate_wants_what_the_design_rests_on():
    from megatron.kernels.tools import manifest

    for row in attention_gluon_backward.aot():
        facts = json.loads(manifest.MANIFEST.read_text())["3.6.0"][row.name]
        assert manifest.faults(row, facts) == []
        assert facts["hot_spill_loads"] == 0
        assert "wait for the one before" in manifest.faults(row, facts | {"serialised": 1})[0]
        assert (
            "the wait for the product has moved up"
            in manifest.faults(row, facts | {"overlapped": 0})[0]
        )
        assert facts["unguarded"] == 0
        assert "other warps may still run" in manifest.faults(row, facts | {"unguarded": 2})[0]
