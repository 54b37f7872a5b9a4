"""tools/check_parity.py as a user calls it: two layouts of one's own flags, bug or noise."""

import shutil
import subprocess
import sys

import pytest
from mutation import ROOT
from parity.mutants import MUTANTS

sys.path.insert(0, str(ROOT / "tools"))
from check_parity import main, shortened  # noqa: E402

from megatron.config.arguments import parse_arguments  # noqa: E402
from megatron.config.groups import CheckpointConfig  # noqa: E402

FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--micro-batch-size 2 --train-iters 1000 --mock-data --vocab-size 49
--tokenizer-type NullTokenizer --lr 1e-2 --lr-warmup-iters 10 --bf16 --save-interval 5""".split()
PLAIN = parse_arguments(FLAGS).config


def words(*layouts: str) -> list[str]:
    """The command line with a --layout for each."""
    return [word for layout in layouts for word in ("--layout", layout)] + FLAGS


@pytest.mark.full
def test_two_layouts_are_noise(tmp_path, capsys):
    save = tmp_path / "untouched"
    given = words("pp2 zero-bubble-v auto", "tp2 sp")
    assert main(["--steps", "4", *given, "--save", str(save)]) == 0
    assert "NOISE: pp2 zero-bubble-v auto and tp2 sp are the same run" in capsys.readouterr().out
    assert not save.exists()


@pytest.mark.full
def test_a_mutant_is_a_bug(tmp_path):
    (edit,) = next(mutant for mutant in MUTANTS if "input gradients" in mutant.name).edits
    shutil.copy(ROOT / "pretrain_gpt.py", tmp_path)
    for part in ("megatron", "kernels", "tools"):
        shutil.copytree(ROOT / part, tmp_path / part)
    (tmp_path / edit.file).write_text(edit.text())
    tool = [sys.executable, str(tmp_path / "tools/check_parity.py")]
    command = [*tool, "--steps", "4", *words("tp2", "tp1")]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 1, done.stderr
    assert "BUG: A (tp2) and B (tp1) are different runs" in done.stdout
    assert "first difference: iteration 1: grad-norm is" in done.stdout


WORDS = (
    "tpN, cpN, dpN, ppN, vN, zeroN, shardN, epN, etpN, a2aN+p2p, sp, serial, mapping, auto, kept, "
    "a2a, allgather, p2p, offload, param-offload, paired, gpipe, 1f1b, "
    "interleaved, zero-bubble, zero-bubble-v"
)


@pytest.mark.parametrize(
    "given, message",
    [
        (words("tp2"), "--layout: expected two, got 1"),
        (words("tp2", "tp2 xx"), f"'xx' is none of {WORDS}"),
        (
            words("tp2", "tp3"),
            "--layout 'tp3' on 3 rank(s): 1 fault in the settings:\n"
            "  --tensor-model-parallel-size 3: must divide",
        ),
        ([*words("tp2", "tp1"), "--hiden-size", "3"], "--hiden-size 3: unknown flag"),
    ],
)
def test_mistakes_are_named_before_anything_runs(given, message, capsys):
    assert main(given) == 2
    assert message in capsys.readouterr().err


def test_the_batch_does_not_follow_the_layout():
    """Without --global-batch-size it would be micro-batch size x data-parallel size."""
    config = shortened(PLAIN, 4, ["tp2", "dp3", "dp2"])
    assert config.training.global_batch_size == 12
    assert (config.training.train_iters, config.training.exit_interval) == (1000, 4)
    assert config.precision.fp64 and not config.precision.bf16


def test_what_belongs_to_a_layout_a_precision_or_a_folder_is_not_kept():
    """--param-cpu-offload needs the ZeRO stage of a layout, and float64 has no narrow moments."""
    more = "--save runs/a --load runs/a --zero-stage 3 --param-cpu-offload --main-grads-dtype bf16"
    moments = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --grad-reduce-in-bf16"
    given = parse_arguments([*FLAGS, *more.split(), *moments.split()]).config
    assert shortened(given, 4, ["tp2", "tp1"]) == shortened(PLAIN, 4, ["tp2", "tp1"])
    assert shortened(given, 4, ["tp2", "tp1"]).checkpoint == CheckpointConfig()
