"""A run by our kernels is the run by PyTorch's: the same losses and gradient norms but for
roundings, dropout included.
"""

import json
from pathlib import Path

import interpreter
import pytest
import torch
from megatron.kernels.dispatch import OPERATORS, flag_of
from parity.worker import run_case

from pretrain_gpt import main

MODEL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 8 "
    "--micro-batch-size 1 --global-batch-size 1 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 60 --lr 1e-2 --train-iters 2 --log-interval 1 --eval-iters 0 "
    "--normalization RMSNorm --swiglu --position-embedding-type rope "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --reset-attention-mask --reset-position-ids"
).split()
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --disable-bias-linear".split()
)
OF_EXPERTS = "grouped-gemm"
TRITON = [
    operator
    for operator, names in OPERATORS.items()
    if "triton" in names and operator != OF_EXPERTS
]
ALL = [word for operator in TRITON for word in (flag_of(operator), "triton")]


def train(capsys, folder: Path, *flags: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    metrics = folder / f"{len(list(folder.iterdir()))}.jsonl"
    assert main([*MODEL, *flags, "--metrics-file", str(metrics)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for operator in [each for each in TRITON if flag_of(each) in flags]:
        assert f"{operator} triton" in shown
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(row["lm loss"], row["grad-norm"]) for row in rows if "lm loss" in row]


def test_losses_agree(one_thread, capsys, tmp_path):
    torchs, ours = train(capsys, tmp_path), train(capsys, tmp_path, *ALL)
    assert len(torchs) == len(ours) == 2
    # fp32 rounds to 6e-8; some hundred roundings in a row, and Adam's first steps, whose direction
    # is a gradient's sign, widen that
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(torchs), rtol=2e-5, atol=0)
    assert ours != torchs


def test_losses_of_experts_agree(one_thread, capsys, tmp_path):
    flag = flag_of(OF_EXPERTS)
    loop, grouped, ours = (
        train(capsys, tmp_path, *EXPERTS, flag, name) for name in OPERATORS[OF_EXPERTS][::-1]
    )
    torch.testing.assert_close(torch.tensor(grouped), torch.tensor(loop), rtol=2e-5, atol=0)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(loop), rtol=2e-5, atol=0)
    assert ours != loop


LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --q-lora-rank 24 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 12 --qk-layernorm --disable-bias-linear"
).split()


@pytest.mark.full
def test_losses_of_latent_attention_agree(one_thread, capsys, tmp_path):
    """Values are filled up with zeros to the width of keys."""
    but_rotary = [operator for operator in TRITON if operator != "rotary"]
    ours = [word for operator in but_rotary for word in (flag_of(operator), "triton")]
    one, other = train(capsys, tmp_path, *LATENT), train(capsys, tmp_path, *LATENT, *ours)
    torch.testing.assert_close(torch.tensor(other), torch.tensor(one), rtol=2e-5, atol=0)
    assert one != other


def steps_of_rank(flags: tuple[str, ...]) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step of a run on this rank."""
    interpreter.patch()
    return [(step.loss, step.grad_norm) for step in run_case(flags).steps]


TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
CP2 = "--context-parallel-size 2 --cp-comm-type"
LAYOUTS = {
    "recomputed": f"{TP2} --recompute-granularity full",
    "allgather": f"{CP2} allgather",
    "a2a": f"{CP2} a2a",
    "ring": f"{CP2} p2p --seq-length 16",
    "split backward": "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble "
    "--num-layers 2 --global-batch-size 2",
    "selective": f"{TP2} --recompute-granularity selective "
    "--recompute-modules layernorm qkv core_attn mlp",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="these ranks have CPU tensors")
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.default("ring", "split backward", "selective")
def test_losses_of_two_ranks_agree(gloo_world, name):
    flags, world = (*MODEL, *LAYOUTS[name].split(), "--train-iters", "1"), gloo_world(2)
    (torchs, _), (ours, _) = (world.run(steps_of_rank, (*flags, *more)) for more in ((), ALL))
    assert len(torchs) == len(ours) == 1 and ours != torchs
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(torchs), rtol=2e-5, atol=0)
