"""The CUDA paths on one GPU: `pytest -m gpu`. Never run on a machine without one."""

import math

import pytest
import torch
from megatron.kernels import philox
from megatron.kernels.attention_masks import AttentionMask
from megatron.tools._report.metrics_file import read_metrics

from megatron.checkpoint.desync import position_sum
from megatron.checkpoint.manager import CheckpointManager, staging_bytes
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.reader import open_checkpoint
from megatron.distributed.setup import set_determinism
from megatron.model.attention.attention import fused_attention
from megatron.model.embedding import accumulate_embedding_grad
from megatron.model.linear import wgrad_gemm
from megatron.model.spec import Box
from megatron.training import pretrain as pretrain_module
from pretrain_gpt import main

pytestmark = pytest.mark.gpu

SMALL = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64
--micro-batch-size 2 --global-batch-size 4 --train-iters 12
--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --lr 1e-3 --log-interval 4
--eval-interval 6 --eval-iters 2""".split()


def run(folder, *flags):
    assert main([*map(str, (*SMALL, "--save", folder, "--load", folder, *flags))]) == 0
    return read_metrics(folder / "metrics.jsonl")


def tensors(folder):
    with open_checkpoint(folder) as checkpoint:
        return {name: checkpoint.read_tensor(name) for name in checkpoint.names}


def test_masks_are_bit_equal_and_weights_within_two_ulp():
    key = philox.key(1, "x")
    rows = [torch.arange(300), torch.arange(300) * 7]
    for keep_mask in (philox.keep_mask, philox.keep_mask_of_halves):
        cuda = keep_mask(key, [r.cuda() for r in rows], 77, 0.1).cpu()
        assert torch.equal(keep_mask(key, rows, 77, 0.1), cuda)
    cpu, cuda = torch.empty(500, 333), torch.empty(500, 333, device="cuda")
    philox.normal(cpu, key, 3, 5, 0.02)
    philox.normal(cuda, key, 3, 5, 0.02)
    ulp = torch.nextafter(cpu.abs(), torch.tensor(math.inf)) - cpu.abs()
    assert ((cuda.cpu() - cpu).abs() <= 2 * ulp).all()


@pytest.mark.parametrize(
    "flags",
    [
        ["--fp64"],
        [
            *"--fp64 --swiglu --normalization RMSNorm --position-embedding-type rope".split(),
            *"--reset-attention-mask --reset-position-ids".split(),
            *"--untie-embeddings-and-output-weights".split(),
        ],
    ],
)
def test_float64_run_equals_the_cpu(tmp_path, monkeypatch, flags):
    """From weights that differ by at most 2 ulp of fp32: the losses agree to a few fp32
    roundings.
    """
    gpu = run(tmp_path / "gpu", *flags)
    monkeypatch.setattr(pretrain_module, "choose_device", lambda *_: (torch.device("cpu"), "gloo"))
    cpu = run(tmp_path / "cpu", *flags)
    for a, b in zip(gpu, cpu):
        assert a["lm loss"] == pytest.approx(b["lm loss"], rel=1e-5) and a[
            "grad-norm"
        ] == pytest.approx(b["grad-norm"], rel=1e-4)


@pytest.mark.parametrize(
    "flags",
    [
        ["--bf16"],
        ["--fp16", "--initial-loss-scale", 2**24, "--loss-scale-window", 3],
        ["--bf16", "--attention-dropout", 0, "--hidden-dropout", 0],
    ],
    ids=["bf16", "fp16", "bf16-fused-attention"],
)
def test_resume_on_the_gpu(tmp_path, flags):
    """Bit for bit, torch's fused attention included: --deterministic-mode holds it to one order of
    summation.
    """
    run(tmp_path / "whole", *flags)
    run(tmp_path / "parts", *flags, "--exit-interval", 5)
    run(tmp_path / "parts", *flags)
    whole, parts = tensors(tmp_path / "whole"), tensors(tmp_path / "parts")
    for name, x in whole.items():
        assert torch.equal(x, parts[name]), name


@pytest.mark.parametrize(
    "groups, dtype", [(8, torch.bfloat16), (2, torch.bfloat16), (8, torch.float32)]
)
def test_fused_attention_repeats_its_bits(groups, dtype):
    """Many blocks of keys add to each query's gradient: in one order when held to it."""
    set_determinism(torch.device("cuda"), True)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(2048, 4, n, 64, generator=generator).to("cuda", dtype).requires_grad_()
        for n in (8, groups, groups, 8)
    )
    first, *others = (
        torch.autograd.grad(fused_attention(q, k, v, AttentionMask(), 0.125), (q, k, v), dout)
        for _ in range(5)
    )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradient_functions(dtype):
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(64, 2, n, generator=generator).to(dtype) for n in (96, 128))
    grad = torch.zeros(128, 96, device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    wgrad_gemm(dy.cuda(), x.cuda(), grad)
    expected = dy.flatten(0, 1).double().T @ x.flatten(0, 1).double()
    # narrow inputs, but the product leaves the tensor cores in fp32
    assert (grad.cpu() - expected).norm() < 1e-6 * expected.norm()
    ids = torch.randint(0, 5, (64, 2), generator=generator)
    results = []
    for _ in range(3):
        rows = torch.zeros(5, 96, device="cuda")
        accumulate_embedding_grad(x.cuda(), ids.cuda(), rows)
        results.append(rows.cpu())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    expected = torch.zeros(5, 96, dtype=torch.float64).index_add_(
        0, ids.flatten(), x.flatten(0, 1).double()
    )
    assert (results[0] - expected).norm() < 1e-6 * expected.norm()


def test_a_background_save_is_of_the_values_at_its_call(tmp_path):
    """The tensors change on the device right after; a step waits for the copies there, and the
    writer for them here.
    """
    data = {
        "a": torch.randn(3000, 1000, device="cuda"),
        "b": torch.randn(700_001, device="cuda").bfloat16(),
    }
    pairs = [
        (Box(name, tuple(t.shape), (0,) * t.ndim, tuple(t.shape)), t) for name, t in data.items()
    ]
    want = {name: tensor.cpu() for name, tensor in data.items()}
    for limit in (None, 1e-9):  # in one wave, and chunk by chunk
        background = CheckpointManager(
            tmp_path / str(limit),
            Ranks(device=torch.device("cuda", torch.cuda.current_device())),
            staging_bytes(pairs, limit),
        )
        for name, tensor in data.items():
            tensor.copy_(want[name])
        background.save(1, pairs, {})
        background.before_update()
        for tensor in data.values():
            tensor.zero_()
        assert background.finalize()
        background.close()
        with open_checkpoint(tmp_path / str(limit)) as checkpoint:
            assert all(
                torch.equal(checkpoint.read_tensor(name), tensor) for name, tensor in want.items()
            )


def test_replicas_are_digested_on_the_device():
    """Each word counts, with its place."""
    data, start = torch.randn(3_000_001), torch.zeros((), dtype=torch.int64)
    whole = position_sum(data.cuda(), start.cuda()).item()
    assert whole == position_sum(data, start).item()
    data[[5, 2_000_000]] = data[[2_000_000, 5]]
    assert whole != position_sum(data.cuda(), start.cuda()).item()
