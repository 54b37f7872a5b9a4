"""Effects that others have published, relative ones, come out of the plan with the right sign and
within a factor of two (docs/performance.md has the figures, and those that do not).
"""

from __future__ import annotations

import pytest
from megatron.tools._plan.hardware import load_hardware
from megatron.tools._plan.program import Program
from megatron.tools._plan.step import StepModel
from step_models import model, resolved

RUN = (
    "--bf16 --attention-dropout 0 --hidden-dropout 0 --mock-data --train-iters 10 --lr 1e-4 "
    "--tokenizer-type NullTokenizer --grad-reduce-in-bf16 --vocab-size 128256"
)
WORDS = {
    "FP8": "--fp8-format hybrid --fp8-min-width 1",
    "FULL": "--recompute-granularity full",
    "AGAIN": "--recompute-granularity selective --recompute-modules",
    "HOST": "--optimizer-cpu-offload --optimizer-offload-fraction 1",
    "L8B": model(32, 4096, 32, 8, 14336),
    "L7B": model(32, 4096, 32, 32, 11008),
    "L70B": model(80, 8192, 64, 8, 28672),
    "GPT3": model(96, 12288, 96, 96, 49152, "--disable-bias-linear"),
    "MPT7B": model(32, 4096, 32, 32, 16384, "--disable-bias-linear"),
    "MPT30B": model(48, 7168, 56, 56, 28672, "--disable-bias-linear"),
    "L16K": model(21, 16384, 128, 16, 53248),
}


def rate(case: str) -> float:
    """Samples a second of each H100: of a model, its flags and settings."""
    words = [word.split("=") for word in case.split()]
    given = {name: int(value[0]) for name, *value in words if value}
    tp, pp, cp, zero, virtual = (given.get(name, 1) for name in ("tp", "pp", "cp", "zero", "vp"))
    flags = " ".join(WORDS.get(word, word) for word, *value in words if not value)
    flags += f" --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
    flags += f" --zero-stage {zero}"
    flags += " --sequence-parallel" if tp > 1 else ""
    flags += f" --context-parallel-size {cp} --cp-comm-type p2p" if cp > 1 else ""
    flags += f" --num-virtual-stages-per-pipeline-rank {virtual}" if virtual > 1 else ""
    flags += f" --seq-length {given.get('seq', 8192)} --micro-batch-size {given.get('micro', 1)}"
    config = resolved(f"{flags} --global-batch-size {given['batch']} {RUN}", given["gpus"], 128256)
    # those with the third generation of attention were measured with TransformerEngine
    generation = given.get("attention", 3)
    program = Program(
        generation, transformer_engine=generation == 3, serial=bool(given.get("serial"))
    )
    step = StepModel(config, 128256, given["gpus"], program)
    return given["batch"] / step.time(load_hardware("h100")).seconds / given["gpus"]


def speed(slow: str, fast: str) -> float:
    """Change of tokens a second of a GPU from the second case to the first."""
    return rate(slow) / rate(fast) - 1


# what is published, then the case and what it is compared with
EFFECTS = """
PP 4 to 8, 70B, fp8: -0.06
    L70B FP8 tp=4 pp=8 vp=5 gpus=32 batch=128
    L70B FP8 tp=4 pp=4 vp=5 gpus=32 batch=128
strong scaling of 175B from 96 to 4,608 GPUs: -0.106
    GPT3 tp=8 pp=12 vp=8 seq=2048 gpus=4608 batch=1152
    GPT3 tp=8 pp=12 vp=8 seq=2048 gpus=96 batch=1152
FSDP from 8 to 512 GPUs, 7B: -0.09
    MPT7B zero=3 seq=2048 micro=6 attention=1 gpus=512 batch=3072
    MPT7B zero=3 seq=2048 micro=6 attention=1 gpus=8 batch=48
FSDP from 128 to 512 GPUs, 30B: -0.04
    MPT30B FULL zero=3 seq=2048 micro=8 attention=1 gpus=512 batch=4096
    MPT30B FULL zero=3 seq=2048 micro=8 attention=1 gpus=128 batch=1024
the activation's product computed again, 8B: -0.02
    L8B AGAIN mlp_act gpus=8 batch=128
    L8B gpus=8 batch=128
fp8, h 4096: 0.31
    L8B FP8 cp=2 gpus=8 batch=128
    L8B cp=2 gpus=8 batch=128
fp8, h 8192: 0.48
    L70B FP8 tp=4 pp=4 cp=2 vp=5 gpus=64 batch=128
    L70B tp=4 pp=4 cp=2 vp=5 gpus=64 batch=128
fp8, h 16384: 0.60
    L16K FP8 tp=8 pp=3 cp=2 vp=7 gpus=96 batch=126
    L16K tp=8 pp=3 cp=2 vp=7 gpus=96 batch=126
collectives of tensor parallelism overlapped with GEMMs, 70B: 0.09
    L70B FULL tp=8 zero=3 micro=16 attention=2 gpus=256 batch=512
    L70B FULL tp=8 zero=3 micro=16 attention=2 serial=1 gpus=256 batch=512
the optimizer in host memory: -0.762
    L8B HOST seq=2048 gpus=8 batch=8
    L8B seq=2048 gpus=8 batch=8
"""
# Those whose sign alone comes out: docs/performance.md lists them.
OFF = """
collectives of tensor parallelism overlapped with GEMMs, 8B: 0.10
    L8B tp=8 gpus=8 batch=16
    L8B tp=8 serial=1 gpus=8 batch=16
8 instead of 4 tensor-parallel ranks, 70B, fp8: -0.28
    L70B FP8 tp=8 pp=4 vp=5 gpus=32 batch=128
    L70B FP8 tp=4 pp=4 vp=5 gpus=32 batch=128
context parallelism of 2, 7B, fp8, 128k: 0.31
    L7B FP8 tp=4 cp=2 seq=131072 gpus=8 batch=8
    L7B FP8 tp=8 seq=131072 gpus=8 batch=8
the up-projection computed again, 8B, published for a mixture of experts of 16B: -0.05
    L8B AGAIN mlp gpus=8 batch=128
    L8B gpus=8 batch=128
"""
# Whose sign does not come out: our ring makes copies that the published program does not make. The
# publication does not state the tensor-parallel size; half is assumed here.
WRONG = """
context parallelism of 2, 7B, fp8, 32k: 0.03
    L7B FP8 tp=2 cp=2 seq=32768 gpus=8 batch=8
    L7B FP8 tp=4 seq=32768 gpus=8 batch=8
"""


def effects(table: str) -> list:
    """Of each effect: what is published, the case, what it is compared with."""
    lines = table.strip().splitlines()
    return [
        pytest.param(float(head.rpartition(": ")[2]), case, base, id=head.rpartition(": ")[0])
        for head, case, base in zip(lines[::3], lines[1::3], lines[2::3], strict=True)
    ]


@pytest.mark.parametrize("published, case, base", effects(EFFECTS))
def test_an_effect_has_its_sign_and_half_its_size(published, case, base):
    assert 0.5 <= speed(case, base) / published <= 2


@pytest.mark.parametrize("published, case, base", effects(OFF))
def test_of_others_the_sign_comes_out(published, case, base):
    share = speed(case, base) / published
    assert share > 0 and not 0.5 <= share <= 2


@pytest.mark.parametrize("published, case, base", effects(WRONG))
def test_what_has_the_wrong_sign_is_listed(published, case, base):
    assert speed(case, base) / published < 0


def test_more_gpus_of_a_tuned_run_lose_little():
    """Weak scaling from 8 to 128 GPUs: 0 to 3% by NVIDIA's tables."""
    loss = speed("L8B cp=2 gpus=128 batch=2048", "L8B cp=2 gpus=8 batch=128")
    assert -0.03 <= loss <= 0
