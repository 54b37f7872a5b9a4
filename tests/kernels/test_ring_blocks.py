"""Our attention kernels over the blocks of a ring: parts joined by their log-sum-exp, and gradients
that add up, against attention of one process.
"""

import pytest
import torch
from gluon_interpreter import Interpreted
from megatron.kernels import lang
from megatron.kernels.attention import attention_reference
from megatron.kernels.attention_launch import Options
from megatron.kernels.attention_masks import AttentionMask
from megatron.kernels.candidates import gluon_backward, gluon_forward

from megatron.model.attention.context_parallel import places_of
from megatron.model.attention.ring_attention import BlockAttention, _join, ring_steps

LENGTH, B, HEADS, GROUPS, D, SCALE = 256, 1, 2, 1, 64, 0.2
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu and test_gluon.py run compiled"
)


@pytest.fixture(params=["triton", "gluon"])
def backend(request, monkeypatch):
    """Both in their interpreters."""
    if request.param == "gluon":
        if gluon_forward.gluon is None:
            pytest.skip("this Triton has no Gluon")
        monkeypatch.setattr(lang, "multiprocessors", lambda _: 2)
        for module, names in (
            (gluon_forward, ["forward_kernel"]),
            (gluon_backward, ["dkv_kernel", "dq_kernel"]),
        ):
            for name in names:
                monkeypatch.setattr(module, name, Interpreted(getattr(module, name), 0))
    return request.param


def ring(block, rank, size, whole, dout):
    """What the ranks of a ring compute, in one process: of one rank's queries (positions, out,
    dq), and what they give to the gradients of all keys and values.
    """
    q, k, v = whole
    places = torch.from_numpy(places_of(LENGTH, size))
    own = places[rank]
    steps = ring_steps(places, rank, None, None, by_positions=False)
    blocks = [places[(rank - index) % size] for index in range(size)]
    out = lse = None
    for step, keys in zip(steps, (held[step.keys] for held, step in zip(blocks, steps))):
        part, part_lse = block.forward(q[own][step.queries], k[keys], v[keys], step.mask)
        if out is None:
            out, lse = part.float(), part_lse
        else:
            _join(out[step.queries], lse[..., step.queries], part, part_lse)
    dq, dk, dv = (torch.zeros(x.shape) for x in (q[own], k, v))
    out = out.to(q.dtype)
    for step, held in zip(steps, blocks):
        at, keys = step.queries, held[step.keys]
        parts = block.backward(
            dout[own][at], out[at], lse[..., at], q[own][at], k[keys], v[keys], step.mask
        )
        for total, places_of_total, part in zip((dq, dk, dv), (at, keys, keys), parts):
            total[places_of_total] += part
    return own, out, dq, dk, dv


def test_blocks_of_a_ring_are_whole_attention(backend):
    generator = torch.Generator().manual_seed(3)
    q, k, v, dout = (
        torch.randn(LENGTH, B, heads, D, generator=generator).bfloat16()
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact, _ = attention_reference(*leaves, scale=SCALE, mask=AttentionMask())
    exact.backward(dout.double())
    block = BlockAttention(backend, Options(SCALE))
    size = 2
    ranks = [ring(block, rank, size, (q, k, v), dout) for rank in range(size)]
    bound = 4 * torch.finfo(torch.bfloat16).eps
    for own, out, dq, *_ in ranks:
        for got, want in ((out, exact[own]), (dq, leaves[0].grad[own])):
            assert (got.double() - want).norm() < bound * want.norm()
    for index, leaf in ((3, leaves[1]), (4, leaves[2])):
        got = sum(found[index] for found in ranks)
        assert (got.double() - leaf.grad).norm() < bound * leaf.grad.norm()
