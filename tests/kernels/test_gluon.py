"""Attention in Gluon, both passes: against the definition in float64 in many orders of events
(gluon_interpreter.py), and that its faults would be found.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checks import assert_as_good, canaries
from gluon_interpreter import Fault, Interpreted
from megatron.kernels import attention, lang
from megatron.kernels.attention import attention_reference, flash_attention
from megatron.kernels.attention_launch import Options, by_key_head
from megatron.kernels.attention_masks import attention_mask
from megatron.kernels.candidates import gluon, gluon_backward, gluon_forward
from megatron.kernels.candidates.gluon_forward import gl, jit, make_barriers, mbarrier, release

pytestmark = pytest.mark.skipif(gluon_forward.gluon is None, reason="this Triton has no Gluon")
ROOT = Path(__file__).resolve().parents[2]
BF16, F16 = torch.bfloat16, torch.float16
# (s, t, b, query heads, key heads, d, dtype, what the mask has, processors of the GPU): lengths are
# odd, whole tiles, or end within the first consumer's rows; with many processors a key head's query
# heads are split over programs of the backward pass
CASES = {
    "causal_gqa": (320, 320, 1, 4, 2, 128, BF16, {}, 3),
    "causal_gqa_in_parts": (150, 150, 1, 4, 1, 64, F16, {}, 132),
    "full_odd": (77, 333, 2, 2, 1, 64, BF16, {"causal": False}, 2),
    "causal_more_keys": (64, 300, 1, 2, 2, 40, BF16, {}, 132),
    "narrow_window_fewer_keys": (400, 200, 1, 1, 1, 64, F16, {"window": 5}, 1),
    "documents_window": (200, 200, 2, 2, 1, 128, BF16, {"documents": (130,), "window": 60}, 1),
}
KERNELS = {
    "forward": (gluon_forward, "forward_kernel"),
    "dkv": (gluon_backward, "dkv_kernel"),
    "dq": (gluon_backward, "dq_kernel"),
}


def make(name):
    """(q, k, v as strided views, mask, processors) of a case."""
    s, t, b, n, g, d, dtype, has, processors = CASES[name]
    generator = torch.Generator().manual_seed(s + d)
    q, k, v = (
        torch.randn(length, b, heads + 1, d, generator=generator).to(dtype)[:, :, :heads]
        for length, heads in ((s, n), (t, g), (t, g))
    )
    mask = dict(has)
    if ends := mask.pop("documents", None):
        # Documents of sample i end i rows later.
        at = torch.arange(s) - torch.arange(b)[:, None]
        starts = torch.zeros_like(at)
        for end in ends:
            starts = torch.where(at >= end, end + torch.arange(b)[:, None], starts)
        mask["document_starts"] = starts
    return q, k, v, attention_mask(s, t, **mask), processors


@pytest.fixture
def interpreted(monkeypatch):
    """`interpreted(processors, seed)`: from now on launches run on the CPU."""
    kernels = {name: getattr(*place) for name, place in KERNELS.items()}

    def use(processors: int, seed: int = 0, **changes: dict[str, str]) -> None:
        monkeypatch.setattr(lang, "multiprocessors", lambda _: processors)
        for name, place in KERNELS.items():
            made = Interpreted(kernels[name], seed, changes.get(name))
            monkeypatch.setattr(*place, made)

    return use


def defined(qkv, scale, mask, dout, dlse):
    """(out, lse, gradients) of the definition in the precision of qkv."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    out, lse = attention_reference(*leaves, scale=scale, mask=mask)
    seen = lse.isfinite()
    total = (out * dout.to(out.dtype)).sum() + (lse[seen] * dlse.to(lse.dtype)[seen]).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.default("causal_gqa_in_parts", "full_odd", "causal_more_keys", "documents_window")
def test_both_passes_equal_the_definition(interpreted, name):
    q, k, v, mask, processors = make(name)
    options, generator = Options(q.shape[-1] ** -0.5), torch.Generator().manual_seed(1)
    dout = torch.randn(q.shape, generator=generator).to(q.dtype)
    dlse = torch.randn(q.shape[1], q.shape[2], len(q), generator=generator)
    exact = defined([x.double() for x in (q, k, v)], options.scale, mask, dout, dlse)
    torchs = defined((q, k, v), options.scale, mask, dout, dlse)
    kept = exact[0].to(q.dtype), exact[1].float()
    results = []
    for seed in range(2):
        interpreted(processors, seed)
        with canaries():
            forward = gluon.forward(*by_key_head((q, k, v)), mask, options)
            backward = gluon.backward(dout, dlse, *kept, (q, k, v), mask, options)
        results.append((*forward, *backward))
    for ours, want, low in zip(results[0], exact, torchs, strict=True):
        assert_as_good(ours, want, low)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_operator_takes_both_passes_in_gluon(interpreted, monkeypatch):
    """Also where the Triton kernels would add up dq atomically. The order of events does not
    matter.
    """
    q, k, v, _, _ = make("narrow_window_fewer_keys")
    monkeypatch.setattr(attention, "backward", None)
    mask, found = attention_mask(70, 70, window=5), []
    for seed in range(3):
        interpreted(2, seed)
        x = [each[:70].detach().requires_grad_() for each in (q, k, v)]
        out, lse = flash_attention(*x, scale=0.1, mask=mask, backend="gluon", deterministic=False)
        (out.float().sin().sum() + lse.sum()).backward()
        found.append([each.grad for each in x])
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, found[0], strict=True))
    y = [each[:70].double().requires_grad_() for each in (q, k, v)]
    out, lse = attention_reference(*y, scale=0.1, mask=mask)
    (out.sin().sum() + lse.sum()).backward()
    for ours, exact in zip(found[0], y, strict=True):
        assert (ours.double() - exact.grad).norm() < 5e-3 * exact.grad.norm()


def test_the_plan_counts_what_the_backward_pass_allocates(monkeypatch):
    """No sum of dq, which atomics would add to, without --deterministic-mode either."""
    q, lse = torch.empty(64, 1, 2, 64, dtype=BF16, device="meta"), torch.empty(1, 2, 64)
    options = Options(0.1, deterministic=False)
    others = attention._arguments(attention_mask(64, 64), options, "gluon")
    made, allocate = [], attention.allocate
    monkeypatch.setattr(
        attention, "allocate", lambda *given: made.append(allocate(*given)) or made[0]
    )
    workspace = lang.FAKES["megatron::flash_attention_backward"]
    assert len(workspace(q, None, q, lse.to("meta"), [q, q, q], *others)) == 3
    assert made[0].dq_sum is None


def test_three_consumers_in_any_order(interpreted):
    """Programs with three tiles each, in orders that starve one partition or another, or the
    copies.
    """
    q, k, v, mask, _ = make("causal_gqa")
    layout = replace(gluon_forward.configuration(128), stages=4, consumers=3)
    found = []
    for seed in range(4):
        interpreted(4, seed)
        parts = by_key_head((q, k, v))
        found.append(gluon_forward.forward(*parts, mask, Options(0.1), layout))
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, found[0], strict=True))


@pytest.mark.gpu
def test_on_a_gpu():
    """In a process that may hang."""
    from megatron.benchmarks.peers.kernel_cases import GLUON_CHECK

    if reason := gluon.unsupported_reason(torch.device("cuda"), BF16):
        pytest.skip(reason)
    subprocess.run([sys.executable, "-c", GLUON_CHECK], cwd=ROOT, timeout=200, check=True)


# Of each: the kernel, what must be reported, and a change of its source. One of each kind.
MUTANTS = """
q's phase does not change; forward; is read|deadlock
-q_full.index(PART), index & 1
+q_full.index(PART), 0
k is released too early; forward; is written, and a read
-        x = warpgroup_mma_wait(1, deps=[x])
-        release(k_empty.index(PART * STAGES + (count + 1) % STAGES))
+        release(k_empty.index(PART * STAGES + (count + 1) % STAGES))
+        x = warpgroup_mma_wait(1, deps=[x])
warps do not meet before a release; forward; is written, and a read|a phase ends
-    gl.thread_barrier()
-    mbarrier.expect(empty, 0)
+    mbarrier.expect(empty, 0)
a buffer beyond the ring; forward; buffer 2 of 2
-k_ring.index(count % STAGES)
+k_ring.index(count)
a wait for too little; forward; before it was waited for
-x = warpgroup_mma_wait(1, deps=[x])
+x = warpgroup_mma_wait(2, deps=[x])
no fence before the store; forward; has no fence
-        fence_async_shared()
the last store is not waited for; forward; before a store|is written
-    tma.store_wait(0)
+    pass
tiles are counted forwards; forward; outside its tensor|beyond
-place = gl.where(rounds % 2 == 0, program, programs - 1 - program)
+place = program
dk takes q of another block; dkv; is read|is written
-dk = add_product(dk, ds, q_ring.index(before)
+dk = add_product(dk, ds, q_ring.index((count + 1) % STAGES)
bytes of lse and delta are forgotten; dkv; deadlock|is read
-2 * q.block_type.nbytes + 2 * base.block_type.nbytes
+2 * q.block_type.nbytes
both consumers store the same rows; dq; written twice
-+= PART * R
++= 0 * R
""".strip()


def read_mutants() -> dict[str, tuple[str, str, dict[str, str]]]:
    """By name: kernel, message, and the change by what it replaces."""
    found = {}
    for block in re.split(r"\n(?![-+])", MUTANTS):
        head, *lines = block.splitlines()
        name, kernel, message = head.split("; ")
        old, new = ("\n".join(x[1:] for x in lines if x[0] == sign) for sign in "-+")
        found[name] = kernel, message, {old: new}
    return found


FAULTS = read_mutants()


@pytest.fixture(scope="module")
def jobs():
    """What the passes are called with. Forward: 15 tiles of 5 blocks for 4 programs, so that the
    last round of tiles is not complete and dealt out backwards. Backward: eight blocks of queries
    of two heads by three of keys, for rings of three buffers.
    """
    generator = torch.Generator().manual_seed(1)
    (q, k, v), (x, y, z) = (
        [
            torch.randn(length, 1, heads, 16, generator=generator).bfloat16()
            for length, heads in ((s, n), (t, 1), (t, 1))
        ]
        for s, t, n in ((260, 600, 5), (500, 300, 2))
    )
    layout = replace(gluon_forward.configuration(64), stages=2)
    options, mask = Options(0.1), attention_mask(500, 300, causal=False)
    out, lse = attention_reference(x, y, z, scale=0.1, mask=mask)
    forward_mask = attention_mask(260, 600, causal=False)
    return {
        "forward": (*by_key_head((q, k, v)), forward_mask, options, layout),
        "backward": (torch.ones_like(out), None, out, lse, (x, y, z), mask, options),
    }


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.default(
    "q's phase does not change",
    "k is released too early",
    "warps do not meet before a release",
    "no fence before the store",
    "dk takes q of another block",
    "both consumers store the same rows",
)
def test_mutants_are_found(interpreted, monkeypatch, jobs, name):
    """In whatever order things happen."""
    which, message, change = FAULTS[name]
    layout = replace(gluon_backward.configuration("dkv", 64), stages=3)
    monkeypatch.setattr(gluon_backward, "configuration", lambda kernel, d: layout)
    other = "dq" if which == "dkv" else "dkv"
    monkeypatch.setattr(gluon_backward, f"_launch_{other}", lambda *_: None)
    for seed in range(2):
        interpreted(4, seed, **{which: change})
        with pytest.raises(Fault, match=message):
            if which == "forward":
                gluon_forward.forward(*jobs["forward"])
            else:
                gluon_backward.backward(*jobs["backward"])


@jit
def _follow(full, empty):
    for step in range(4):
        mbarrier.wait(full.index(0), step & 1)
        release(empty.index(0))


@jit
def _lead(full, empty):
    for step in range(4):
        mbarrier.expect(full.index(0), 0)
        mbarrier.wait(empty.index(0), step & 1)


@jit
def phases_kernel():
    """Four warps follow another one from phase to phase."""
    both = make_barriers(1, 1), make_barriers(1, 1)
    gl.warp_specialize([(_follow, both), (_lead, both)], [1], [24])


def test_a_phase_that_a_slow_warp_would_miss_is_found():
    """One warp's arrival ends the phase that another one may still wait for."""
    for seed in range(3):
        Interpreted(phases_kernel, seed)[(1,)](num_warps=4)
        alone = {"gl.thread_barrier()\n    mbarrier.expect": "mbarrier.expect"}
        with pytest.raises(Fault, match="a phase ends before all warps have seen the last one"):
            Interpreted(phases_kernel, seed, alone)[(1,)](num_warps=4)


def test_the_gate_wants_what_the_design_rests_on():
    from megatron.kernels.tools import manifest

    held = json.loads(manifest.MANIFEST.read_text())["3.6.0"]
    for row in manifest.rows(only="attention_gluon").values():
        facts = held[row.name]
        assert manifest.faults(row, facts) == [] and facts["unguarded"] == 0
        for broken, fault in (
            ({"setmaxnreg": 0}, "no register changes hands"),
            ({"overlapped": 0}, "the wait for the product has moved up"),
            ({"unguarded": 2}, "other warps may still run"),
            ({"serialised": 1}, "wait for the one before"),
        ):
            assert fault in manifest.faults(row, facts | broken)[0]


def test_what_it_cannot_do_is_said():
    assert gluon.unsupported_reason(torch.device("cpu"), BF16)
    assert gluon.unsupported_reason(torch.device("cuda"), torch.float32)
    assert gluon.unsupported_heads(256) and gluon.unsupported_heads(64, softcap=1.0)
    assert gluon.unsupported_heads(64, drop=0.1)
    assert gluon.unsupported_heads(64) is gluon.unsupported_heads(None) is None
