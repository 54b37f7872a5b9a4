"""The forward pass in Gluon against the definition in float64, in many orders of events
(gluon_interpreter.py), and that its faults would be found.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checks import Allocations, assert_as_good, canaries
from gluon_cases import make
from gluon_interpreter import Fault, Interpreted
from megatron.kernels import attention_gluon, lang
from megatron.kernels.attention import attention_reference, flash_attention
from megatron.kernels.attention_gluon import (
    cannot,
    forward_kernel,
    gl,
    jit,
    make_barriers,
    mbarrier,
    release,
    unfit,
)
from megatron.kernels.attention_launch import Options
from megatron.kernels.attention_masks import attention_mask

pytestmark = pytest.mark.skipif(attention_gluon.gluon is None, reason="this Triton has no Gluon")
ROOT = Path(__file__).resolve().parents[2]
BF16, F16 = torch.bfloat16, torch.float16
# (s, t, b, query heads, key heads, d, dtype, what the mask has, programs): lengths are odd, whole
# tiles, or end within the first consumer's rows
CASES = {
    "causal_gqa": (320, 320, 1, 4, 2, 128, BF16, {}, 3),
    "full_odd": (77, 333, 2, 2, 1, 64, BF16, {"causal": False}, 2),
    "full_whole_blocks": (256, 256, 1, 2, 2, 128, F16, {"causal": False}, 2),
    "causal_more_queries": (300, 130, 1, 1, 1, 96, F16, {}, 1),
    "causal_more_keys": (64, 300, 1, 2, 2, 40, BF16, {}, 132),
    "window": (448, 448, 1, 1, 1, 64, BF16, {"window": 150}, 2),
    "narrow_window_fewer_keys": (400, 200, 1, 1, 1, 64, F16, {"window": 5}, 1),
    "documents": (384, 384, 2, 1, 1, 64, BF16, {"documents": (3, 200)}, 2),
    "documents_window": (200, 200, 2, 2, 1, 128, BF16, {"documents": (130,), "window": 60}, 1),
}


@pytest.fixture
def interpreted(monkeypatch):
    """`interpreted(programs, seed)`: from now on launches run on the CPU."""

    def use(programs: int, seed: int = 0, changes: dict[str, str] | None = None) -> None:
        monkeypatch.setattr(lang, "multiprocessors", lambda _: programs)
        monkeypatch.setattr(
            attention_gluon, "forward_kernel", Interpreted(forward_kernel, seed, changes)
        )

    return use


@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(interpreted, name):
    q, k, v, mask, programs = make(CASES[name])
    scale = q.shape[-1] ** -0.5
    exact = attention_reference(q.double(), k.double(), v.double(), scale=scale, mask=mask)
    torchs = attention_reference(q, k, v, scale=scale, mask=mask)
    results = []
    for seed in range(3):
        interpreted(programs, seed)
        with canaries():
            results.append(flash_attention(q, k, v, scale=scale, mask=mask, gluon=True))
    for ours, want, low in zip(results[0], exact, torchs, strict=True):
        assert_as_good(ours, want, low)
    assert all(
        torch.equal(a, b) for other in results[1:] for a, b in zip(other, results[0], strict=True)
    )


@pytest.mark.parametrize(
    "layout", [{"stages": 2}, {"stages": 3, "pingpong": 0}, {"stages": 4, "consumers": 3}], ids=str
)
@pytest.mark.default("{'stages': 4, 'consumers': 3}")
def test_order_does_not_matter(interpreted, monkeypatch, layout):
    """Programs with three tiles each, in twelve orders that starve one partition or another, or the
    copies.
    """
    q, k, v, mask, _ = make(CASES["causal_gqa"])
    layout = replace(attention_gluon.configuration(128), **layout)
    monkeypatch.setattr(attention_gluon, "configuration", lambda _: layout)
    found = []
    for seed in range(12):
        interpreted(4, seed)
        found.append(flash_attention(q, k, v, scale=0.1, mask=mask, gluon=True))
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(other, found[0], strict=True)
    )


def test_the_fused_projection_is_read_where_it_lies(interpreted, monkeypatch):
    """Two key heads of three query heads each: the same bits as of its parts, and nothing is
    copied.
    """
    fused = torch.randn(70, 2, 2, 3 + 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, k, v = fused.split((3, 1, 1), 3)
    interpreted(3)
    parts = flash_attention(
        q.reshape(70, 2, 6, 64),
        k.squeeze(3),
        v.squeeze(3),
        scale=0.1,
        mask=attention_mask(70, 70),
        gluon=True,
    )
    allocations = Allocations()
    monkeypatch.setattr(attention_gluon, "forward", allocations.inside(attention_gluon.forward))
    whole = flash_attention(fused, scale=0.1, mask=attention_mask(70, 70), gluon=True)
    assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))
    # the output
    assert [(name, count) for name, count in allocations.seen if count >= q.numel()] == [
        ("empty", q.numel())
    ]


@pytest.mark.gpu
def test_on_a_gpu():
    """In a process that may hang."""
    from megatron.benchmarks.peers.kernel_cases import GLUON_CHECK

    if reason := unfit(torch.device("cuda"), BF16):
        pytest.skip(reason)
    subprocess.run([sys.executable, "-c", GLUON_CHECK], cwd=ROOT, timeout=200, check=True)


def test_nan_stays_in_its_rows(interpreted):
    q, k, v, mask, _ = make(CASES["causal_gqa"])
    q, k = q.clone(), k.clone()
    q[5, 0, 0], k[200, 0, 1, 0] = float("nan"), float("inf")
    interpreted(2)
    out, lse = flash_attention(q, k, v, scale=0.1, mask=mask, gluon=True)
    bad = out.isnan().any(-1)[:, 0]
    assert (
        bad[:, 0].nonzero().flatten().tolist() == [5]
        and not bad[:, 1].any()
        and bad[200:, 2:].any()
        and not bad[:200, 2:].any()
    )


# what is changed in the kernel's source, what into, and what must be said about it
MUTANTS = {
    "k is not waited for": (
        (
            "        mbarrier.wait(k_full.index((count + 2) % STAGES), (count + 2) // STAGES & "
            "1, pred=step + 1 < steps)\n"
        ),
        "",
        "is read, and the write|is written, and a read",
    ),
    "the first k is not waited for": (
        "        mbarrier.wait(k_full.index(count % STAGES), count // STAGES & 1)\n",
        "",
        "is read",
    ),
    "v is not waited for": (
        "    mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)\n",
        "",
        "is read",
    ),
    "q is not waited for": (
        "        mbarrier.wait(q_full.index(PART), index & 1)\n",
        "",
        "is read",
    ),
    "q's phase does not change": (
        "q_full.index(PART), index & 1",
        "q_full.index(PART), 0",
        "is read|deadlock",
    ),
    "the producer does not wait": (
        "mbarrier.wait(empty.index(each * STAGES + slot), (count // STAGES & 1) ^ 1)",
        "pass",
        "is written, and a read",
    ),
    "the producer waits for one consumer's k": (
        "gl.static_range(RELEASES)",
        "gl.static_range(1)",
        "is written, and a read|deadlock",
    ),
    "the producer's phase is wrong": (
        "(count // STAGES & 1) ^ 1)",
        "count // STAGES & 1)",
        "deadlock",
    ),
    "k is not released": (
        "        release(k_empty.index(PART * STAGES + (count + 1) % STAGES))\n",
        "",
        "deadlock",
    ),
    "v is not released": (
        "        release(v_empty.index(count % STAGES))\n        p = _carried",
        "        p = _carried",
        "deadlock",
    ),
    "q is not released": (
        "        release(q_empty.index(PART))\n",
        "",
        "deadlock",
    ),
    "k is released too early": (
        (
            "        x = warpgroup_mma_wait(1, deps=[x])\n        "
            "release(k_empty.index(PART * STAGES + (count + 1) % STAGES))\n"
        ),
        (
            "        release(k_empty.index(PART * STAGES + (count + 1) % STAGES))\n        x = "
            "warpgroup_mma_wait(1, deps=[x])\n"
        ),
        "is written, and a read",
    ),
    "v is released before its product": (
        (
            "        acc = warpgroup_mma_wait(0, deps=[acc])\n        "
            "release(v_empty.index(count % STAGES))\n        p = _carried"
        ),
        (
            "        release(v_empty.index(count % STAGES))\n        acc = "
            "warpgroup_mma_wait(0, deps=[acc])\n        p = _carried"
        ),
        "is written, and a read",
    ),
    "warps do not meet before a release": (
        "    gl.thread_barrier()\n    mbarrier.expect(empty, 0)\n",
        "    mbarrier.expect(empty, 0)\n",
        "is written, and a read|a phase ends",
    ),
    "warps meet after a release": (
        "    gl.thread_barrier()\n    mbarrier.expect(empty, 0)\n",
        "    mbarrier.expect(empty, 0)\n    gl.thread_barrier()\n",
        "is written, and a read|a phase ends",
    ),
    "all consumers release k at the first one's mbarrier": (
        "release(k_empty.index(PART * STAGES + (count + 1) % STAGES))",
        "release(k_empty.index((count + 1) % STAGES))",
        "is written|deadlock|a phase ends",
    ),
    "one consumer is enough": (
        "make_barriers(STAGES, PARTS)",
        "make_barriers(STAGES, 1)",
        "is written|arrivals|is read|deadlock",
    ),
    "the wrong buffer": (
        "v_ring.index(count % STAGES)",
        "v_ring.index((count + 1) % STAGES)",
        "is read",
    ),
    "a buffer beyond the ring": (
        "k_ring.index(count % STAGES)",
        "k_ring.index(count)",
        "buffer 2 of 2",
    ),
    "scores are not waited for": (
        "        x = warpgroup_mma_wait(1, deps=[x])\n",
        "",
        "before it was waited for",
    ),
    "a wait for too little": (
        "x = warpgroup_mma_wait(1, deps=[x])",
        "x = warpgroup_mma_wait(2, deps=[x])",
        "before it was waited for",
    ),
    "no fence before the store": ("        fence_async_shared()\n", "", "has no fence"),
    "the store is not waited for": (
        "    tma.store_wait(0)\n    tile",
        "    tile",
        "is written, and a read",
    ),
    "the last store is not waited for": (
        "    tma.store_wait(0)\n",
        "    pass\n",
        "before a store|is written",
    ),
    "too few bytes": ("source.block_type.nbytes", "source.block_type.nbytes // 2", "deadlock"),
    "a turn waits for the block after": (
        "block = count + (1 if PART > 0 else 0)",
        "block = count + 1",
        "deadlock",
    ),
    "a turn waits for its own consumer": (
        "slot = (PART + PARTS - 1) % PARTS * STAGES + block % STAGES",
        "slot = PART * STAGES + block % STAGES",
        "deadlock",
    ),
    "a turn's phase is wrong": (
        "mbarrier.wait(k_empty.index(slot), block // STAGES & 1)",
        "mbarrier.wait(k_empty.index(slot), (block // STAGES & 1) ^ 1)",
        "deadlock|a phase ends",
    ),
    "tiles are counted forwards": (
        "place = gl.where(rounds % 2 == 0, program, programs - 1 - program)",
        "place = program",
        "outside its tensor|beyond",
    ),
}


@pytest.fixture(scope="module")
def job():
    """15 tiles of 5 blocks for 4 programs: the last round of tiles is not complete and dealt out
    backwards.
    """
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(length, 1, heads, 16, generator=generator).bfloat16()
        for length, heads in ((260, 5), (600, 1), (600, 1))
    )
    return q.unflatten(2, (1, 5)), k, v, attention_mask(260, 600, causal=False), Options(0.1)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(interpreted, monkeypatch, job, name):
    """In whatever order things happen."""
    old, new, message = MUTANTS[name]
    layout = replace(attention_gluon.configuration(64), stages=2)
    for seed in range(2):
        interpreted(4, seed, {old: new})
        with pytest.raises(Fault, match=message):
            attention_gluon.forward(*job, layout)


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

    for row in attention_gluon.aot():
        facts = json.loads(manifest.MANIFEST.read_text())["3.6.0"][row.name]
        assert manifest.faults(row, facts) == []
        assert "no register changes hands" in manifest.faults(row, facts | {"setmaxnreg": 0})[0]
        assert (
            "the wait for the product has moved up"
            in manifest.faults(row, facts | {"overlapped": 0})[0]
        )
        assert facts["unguarded"] == 0
        assert "other warps may still run" in manifest.faults(row, facts | {"unguarded": 2})[0]


def test_what_it_cannot_do_is_said():
    assert (
        unfit(torch.device("cpu"), BF16) == "it needs a GPU, Triton's interpreter cannot run Gluon"
    )
    assert (
        unfit(torch.device("cuda"), torch.float32) == "float32, the kernel computes bf16 and fp16"
    )
    assert (
        cannot(256)
        == cannot(256, softcap=1.0)
        == "head dimension 256, which is no multiple of 8 from 40 to 128"
    )
    assert (
        "--attn-logit-softcapping" in cannot(64, softcap=1.0)
        and "--attention-dropout 0" in cannot(64, drop=0.1)
        and cannot(64) is cannot(None) is None
    )
