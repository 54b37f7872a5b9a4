"""Three numbers a token and the gradient in place, against the definition in float64; the layer
that uses them, alone and over ranks.
"""

import pytest
import torch
from checks import check_case, error
from megatron.kernels.cross_entropy import (
    configuration,
    cross_entropy_backward_,
    cross_entropy_parts,
    cross_entropy_parts_reference,
    cross_entropy_reference,
)

from megatron.model import loss as layer

# tokens, real columns, all columns
SHAPES = [(5, 33, 48), (2, 5000, 5008), (1, 1, 16)]


def draw(tokens, columns, width, dtype, device, scale=4.0):
    generator = torch.Generator().manual_seed(tokens + columns)
    logits = (scale * torch.randn(tokens, width, generator=generator)).to(device, dtype)
    logits[:, columns:] = torch.nan  # whatever padding holds
    labels = torch.randint(0, columns, (tokens,), generator=generator).to(device)
    dloss, dlse = (torch.rand(tokens, generator=generator).to(device) + 0.5 for _ in range(2))
    return logits, labels, dloss, dlse


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens, columns, width", SHAPES)
def test_loss_and_gradient(device, tokens, columns, width, dtype, softcap):
    settings = {"tokens": tokens, "width": width, "columns": columns, "softcap": softcap}
    check_case("cross_entropy", settings, dtype, device)


def test_rows_that_lie_apart(device):
    logits, labels, dloss, dlse = draw(4, 40, 48, torch.float32, device)
    apart = torch.full((4, 100), 9.0, device=device)
    apart[:, :48] = logits
    found = [cross_entropy_parts(each, labels, 40, None) for each in (apart[:, :48], logits)]
    assert torch.equal(*found)
    lse = cross_entropy_reference(logits, labels, 40, None)[1]
    for each in (logits, apart[:, :48]):
        cross_entropy_backward_(each, labels, lse, dloss[:1].expand(4), dlse, 40, None)
    assert torch.equal(apart[:, :48], logits) and (apart[:, 48:] == 9).all()


def test_labels_of_other_ranks(device):
    """Neither a number nor a gradient of theirs here, whatever the columns: below, in the padding,
    above.
    """
    logits, _, dloss, dlse = draw(4, 40, 48, torch.float32, device)
    labels = torch.tensor([-1, 40, 47, 2000], device=device)
    parts = cross_entropy_parts(logits, labels, 40, None)
    assert (parts[2] == 0).all()
    exact = (dloss + dlse)[:, None] * torch.softmax(logits[:, :40].double(), -1)
    cross_entropy_backward_(logits, labels, parts[1].log() + parts[0], dloss, dlse, 40, None)
    assert error(logits[:, :40], exact) < 2e-6 and (logits[:, 40:] == 0).all()


def test_a_rank_of_padding_alone(device):
    logits = torch.full((3, 32), torch.nan, device=device)
    labels = torch.zeros(3, dtype=torch.int64, device=device)
    parts = cross_entropy_parts(logits, labels, 0, None)
    assert torch.equal(parts, cross_entropy_parts_reference(logits, labels, 0, None))
    cross_entropy_backward_(logits, labels, *torch.ones(3, 3, device=device), 0, None)
    assert (logits == 0).all()


def test_huge_and_infinite_logits(device):
    low, inf = -3e4, torch.inf
    rows = torch.zeros(6, 600, device=device)
    rows[0], rows[1, :], rows[2], rows[5] = low, -inf, 3e38, -3e38
    rows[1, 7], rows[3, 5], rows[4, 9] = 3.0, torch.nan, inf
    labels = torch.full((6,), 7, device=device)
    top, exponentials, target = cross_entropy_parts(rows, labels, 600, None)
    lse = exponentials.log() + top
    ends = torch.tensor([low, 3.0, 3e38]) + torch.tensor([600.0, 1, 1]).log()
    torch.testing.assert_close(lse[:3], ends.to(device))
    assert not lse[3:5].isfinite().any() and lse[5] == -3e38 and target[5] == -3e38
    ones = torch.ones(6, device=device)
    cross_entropy_backward_(rows, labels, lse, ones, 0 * ones, 600, None)
    assert rows[3:5].isnan().any(-1).all()  # the loop finds a NaN in the gradient
    torch.testing.assert_close(rows[0, 7], torch.tensor(1 / 600 - 1, device=device))
    torch.testing.assert_close(rows[1], torch.zeros(600, device=device))


def test_an_online_softmax_forgets_no_block(device):
    """The maximum in any of three blocks, and much less in the others."""
    block = configuration(9000).block
    for where in (0, block - 1, block, 2 * block, 8999):
        logits = torch.full((1, 9000), -2.0, device=device)
        logits[0, where] = 6.0
        parts = cross_entropy_parts(logits, torch.tensor([where], device=device), 9000, None)
        wanted = torch.tensor([6.0, 1 + 8999 * torch.tensor(-8.0).exp(), 6.0], device=device)
        torch.testing.assert_close(parts[:, 0], wanted)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_layer_with_either_backend(device, softcap):
    """Loss, log-sum-exp and the gradient in the logits' storage, in bf16 with a z-loss."""
    logits, labels, weights, _ = draw(6, 300, 320, torch.bfloat16, device)
    found = {}
    for backend in ("torch", "triton"):
        z = logits.clone().view(3, 2, 320).requires_grad_()
        inner, storages = z * 1, []
        inner.register_hook(lambda g, storages=storages: storages.append(g.data_ptr()))
        sharded = layer.sharded_cross_entropy(320, 300, softcap, backend=backend)
        loss, lse = layer.cross_entropy(inner, labels.view(3, 2), sharded)
        pointer = inner.data_ptr()
        ((loss + 0.1 * lse.square()) * weights.view(3, 2)).sum().backward()
        assert storages == [pointer]
        found[backend] = loss.detach(), lse.detach(), z.grad
    for ours, torchs in zip(found["triton"], found["torch"], strict=True):
        rtol = 2**-7 if ours.dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(ours, torchs, rtol=rtol, atol=1e-6)
