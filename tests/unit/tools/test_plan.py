"""tools/plan.py: its table is the banner's arithmetic, and bad input gets the one error that
pretrain_gpt.py gives.
"""

from __future__ import annotations

import pytest
from megatron.tools import plan
from megatron.tools._plan.checkpoint import best_interval, shard_bytes, time_lost

import pretrain_gpt
from megatron.config.validate import resolve

FLAGS = """--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024
--micro-batch-size 4 --global-batch-size 512
--train-iters 10 --lr 1e-4 --mock-data --vocab-size 50256 --bf16 --hidden-dropout 0
--attention-dropout 0 --zero-stage 2""".split()


def lines(capsys, *flags: object, code: int = 0) -> list[str]:
    assert plan.main(["memory", *map(str, flags)]) == code
    out = capsys.readouterr()
    return (out.out if code == 0 else out.err).splitlines()


def test_the_table_has_a_row_for_each_pipeline_rank(capsys):
    found = lines(capsys, *FLAGS, "--world-size", 16, "--pipeline-model-parallel-size", 4)
    head = next(index for index, line in enumerate(found) if line.startswith("rank  parameters"))
    assert found[0].startswith("fits: the plan needs ") and "of which 74 are usable" in found[0]
    assert found[1] == "ZeRO stage 2, a block shared by 4 of 4 data-parallel ranks"
    assert [line.split()[0] for line in found[head + 1 : head + 5]] == ["0", "1", "2", "3"]
    cells = found[head + 2].split()
    parameters, gradients, optimizer = map(float, cells[1:4])
    # 2 + 4/4 + 12/4
    assert gradients == pytest.approx(parameters / 2, rel=0.01)
    assert optimizer == pytest.approx(1.5 * parameters, rel=0.01)
    assert any(line.startswith("resident 6 bytes a parameter") for line in found)
    assert any(line.startswith("peak by ZeRO stage: ") for line in found)
    assert found[-3] == "with 50 GB/s a rank and 40% of 989 TFLOP/s:"
    assert found[-2].startswith(
        "reduce-scatter of every micro-batch does not hide: 4,096 tokens a micro-batch of "
        "7,912 needed"
    )


def test_its_own_flags(capsys):
    world = "--world-size", 8
    small = lines(capsys, *FLAGS, *world, "--device-memory", 4)
    assert any(line.startswith("4 GiB: fits with no stage") for line in small)
    machine = "--bandwidth=400", "--mfu", 0.5, "--peak-tflops", 300
    fast = lines(capsys, *FLAGS, *world, *machine)
    assert "80 GiB: fits with stage 0" in fast
    assert "with 400 GB/s a rank and 50% of 300 TFLOP/s:" in fast
    assert sum(" hides: " in line for line in fast) == 2


def test_it_says_what_the_dry_run_says(capsys):
    found = lines(capsys, *FLAGS, "--world-size", 8)
    assert pretrain_gpt.main([*FLAGS, "--world-size", "8", "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    total = shown.split("total ")[1].split()[0]
    resident = next(line for line in found if line.startswith("resident"))
    assert resident.split("peak ")[1].startswith(f"{total} GiB")


def test_how_long_a_checkpoint_takes_and_how_often(capsys):
    """354.9M parameters (tied, 50257 + padding) x 12 bytes on 16 ranks; Young's example by hand:
    sqrt(2 x 40 s x 3 h) = 930 s, 8.6% lost.
    """
    ranks = "--world-size", "16"
    speeds = "--write", "0.1", "--copy=2", "--mtbf", "3"
    assert plan.main(["checkpoint", *FLAGS, *ranks, *speeds]) == 0
    size, times, _, plain, background = capsys.readouterr().out.splitlines()
    assert size == "checkpoint of 4.258 GB: GB that each rank writes, by pipeline stage: 0.2662"
    assert times == (
        "at 0.1 GB/s a rank 2.66 s; with --async-save training waits 0.133 s for a copy at 2 GB/s"
    )
    assert plain.startswith("  every 240 s: 2.22% of the time")
    assert background.startswith("  every 53.6 s with --async-save: 0.52% of the time")
    assert best_interval(40, 3 * 3600) == pytest.approx(929.5, rel=1e-3)
    assert time_lost(929.5, 40, 3 * 3600, 0) == pytest.approx(0.0861, rel=1e-3)
    pipeline = "--pipeline-model-parallel-size", "4"
    assert plan.main(["checkpoint", *FLAGS, *ranks, *pipeline]) == 0
    # the last stage's copy of the embedding is not written
    assert capsys.readouterr().out.startswith("checkpoint of 4.258 GB: ")
    tried = 850, best_interval(40, 3 * 3600), 1010
    losses = [time_lost(interval, 40, 3 * 3600, 5) for interval in tried]
    assert min(losses) == losses[1]
    # one save at a time: the next begins when this one is over
    assert best_interval(1, 100, 60) == 60


def checkpoint_bytes(*flags: object) -> float:
    """Bytes of a checkpoint of 8 ranks."""
    config, vocab_size, world_size = plan.asked([*FLAGS, *map(str, flags), "--world-size", "8"])
    config = resolve(config, world_size, vocab_size).config
    stages = shard_bytes(config, vocab_size, world_size)
    return sum(stages) * world_size / len(stages)


def test_a_checkpoint_holds_each_expert_once():
    """However many ranks have a copy of it."""
    experts = "--num-experts", 8, "--moe-ffn-hidden-size", 2048, "--disable-bias-linear"
    sizes = [
        checkpoint_bytes(*experts, "--expert-model-parallel-size", ranks) for ranks in (1, 2, 8)
    ]
    # weights and moments in fp32 of two matrices of each expert in 24 layers
    assert sizes[0] > 12 * 24 * 8 * 2 * 1024 * 2048
    assert sizes == pytest.approx([sizes[0]] * 3)


def test_a_checkpoint_has_frozen_weights_without_moments():
    """2 bytes of a parameter in place of 12."""
    whole, weights = checkpoint_bytes(), checkpoint_bytes("--no-save-optim")
    assert whole == pytest.approx(3 * weights)
    frozen = checkpoint_bytes("--freeze", "layers.0-23")
    assert whole - frozen == pytest.approx(10 * 24 * 12 * 1024**2, rel=0.01)


@pytest.mark.parametrize(
    "flags",
    [
        ["--world-size", "6", "--tensor-model-parallel-size", "4"],
        ["--world-size", "8", "--num-layers", "x"],
    ],
)
def test_bad_flags_get_the_error_of_a_dry_run(capsys, flags):
    shown = lines(capsys, *FLAGS, *flags, code=2)
    assert pretrain_gpt.main([*FLAGS, *flags, "--dry-run"]) == 2
    assert shown == capsys.readouterr().err.splitlines() != []


TABLE, RANKS = ["memory", *FLAGS], ["--world-size", "8"]
REFUSED = [
    (TABLE, "1 fault in the settings:\n  --world-size is missing"),
    ([*TABLE, *RANKS, "--mfu"], "1 fault in the settings:\n  --mfu : expected a number above 0"),
    ([*TABLE, *RANKS, "--bandwidth", "-1"], "--bandwidth -1: expected a number above 0"),
    # what has no effect, or cannot be written, before anything is computed
    (["measure"], "--out FILE.json is missing"),
    (["fit", "rows.csv"], "--out FILE.json is missing"),
    (["measure", "--out", "none/machine.json"], "--out none/machine.json: cannot be written"),
    (["validate", "rows.csv", "--out", "."], "--out .: cannot be written"),
    (["measure", "--out", "m.json", "--hardware", "h100"], "--hardware: unexpected argument"),
    (["step", *FLAGS, *RANKS, "--out", "step.json"], "--out"),
    (["step", *FLAGS, *RANKS, "--gpus-per-node", "0.5"], "a whole number"),
]


@pytest.mark.parametrize("words, message", REFUSED)
def test_faults_of_its_own_flags(capsys, words, message):
    assert plan.main(words) == 2
    assert message in capsys.readouterr().err
