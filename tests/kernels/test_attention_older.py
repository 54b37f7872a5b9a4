"""Flash attention on GPUs older than Hopper: by pointers instead of descriptors, with separate
tiles and without atomic sums.
"""

import pytest
import torch
from checks import assert_as_good, canaries
from megatron.kernels import attention_launch, lang
from megatron.kernels.attention import attention_reference, flash_attention, unfit
from megatron.kernels.attention_backward import why_not_atomic
from megatron.kernels.attention_launch import operand
from megatron.kernels.attention_masks import attention_mask
from test_attention import documents, make, results


@pytest.fixture
def ampere(monkeypatch):
    monkeypatch.setattr(lang, "capability", lambda _: 80)


@pytest.mark.parametrize("name", ["odd_gqa", "full_softcap_dropout_d96"])
@pytest.mark.default("odd_gqa")
def test_pointers_are_as_good_as_descriptors(device, name, monkeypatch):
    """Rows and columns beyond the last, strided views, dropout; in the interpreter the same
    bits.
    """
    tensors, gradients, (s, t, has), options, tile = make(name, device)
    mask = attention_mask(s, t, **has, tile=tile)
    if device.type == "cpu":
        before = results(flash_attention, tensors, gradients, mask, tile=tile, **options)
    monkeypatch.setattr(lang, "capability", lambda _: 80)
    monkeypatch.setattr(attention_launch, "descriptor", None)
    with canaries():
        after = results(flash_attention, tensors, gradients, mask, tile=tile, **options)
    if device.type == "cpu":
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        return
    exact, torchs = (
        results(attention_reference, [x.to(kind) for x in tensors], gradients, mask, **options)
        for kind in (torch.float64, tensors[0].dtype)
    )
    for got, want, low in zip(after, exact, torchs, strict=True):
        assert_as_good(got, want, low)


@pytest.mark.parametrize("d", [64, 128])
def test_shipped_tiles(device, ampere, d):
    generator = torch.Generator().manual_seed(d)
    tensors = [
        torch.randn(136, 1, 1, d, generator=generator).bfloat16().to(device) for _ in range(3)
    ]
    gradients = (
        torch.randn(136, 1, 1, d, generator=generator).bfloat16().to(device),
        torch.randn(1, 1, 136, generator=generator).to(device),
    )
    mask = attention_mask(
        136, 136, document_starts=documents(1, 136, 90).to(device) if d == 64 else None
    )
    exact = results(
        attention_reference, [x.double() for x in tensors], gradients, mask, scale=d**-0.5
    )
    torchs = results(attention_reference, tensors, gradients, mask, scale=d**-0.5)
    ours = results(flash_attention, tensors, gradients, mask, scale=d**-0.5)
    for got, want, low in zip(ours, exact, torchs, strict=True):
        assert_as_good(got, want, low)
    with pytest.raises(ValueError, match="compute capability 8.0"):
        flash_attention(*tensors, mask=mask, scale=d**-0.5, deterministic=False)


def test_what_an_older_gpu_is_given(ampere):
    x = torch.zeros(5, 2, 3, 48)[:, :, 1:]
    pointer, *numbers = operand(x, 64)
    assert pointer is x and numbers == [5, 48, 288, 144, 48]
    assert (
        "compute capability 8.0" in why_not_atomic(64, None, 0.0, 80)
        and why_not_atomic(64, None, 0.0, 90) is None
    )
    assert [unfit(d, 86, drop=0.1) is None for d in (64, 96, 128)] == [True] * 3 and unfit(
        256, 80, softcap=1.0
    ) is None
    assert (
        unfit(256, 89).endswith(
            "of shared memory for a block of threads, a GPU of compute capability 8.9 has 99"
        )
        and unfit(128, 80) is None
    )
