"""Whole runs through the command line, in this process: resume, evaluation, exits, precision,
batches, bad steps.
"""

import dataclasses
import math
import re
import signal
import sys
import time
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from megatron.tools._report.metrics_file import read_metrics

from megatron.checkpoint import manager
from megatron.checkpoint.manifest import CheckpointError
from megatron.checkpoint.reader import open_checkpoint
from megatron.config.arguments import parse_arguments
from megatron.config.errors import UserError
from megatron.data.loader import Source
from megatron.model.layer import HeadLayer
from megatron.observe.tracking import Tracker
from megatron.training import exit, loop, prepare, pretrain
from megatron.training import step as training_step
from pretrain_gpt import main
from tools import compare_runs

TINY = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--micro-batch-size 2 --global-batch-size 4 --train-iters 12
--mock-data --tokenizer-type NullTokenizer --vocab-size 49 --lr 1e-2 --lr-decay-style cosine
--lr-warmup-iters 2 --log-interval 1
--eval-interval 4 --eval-iters 2""".split()
RESULTS = (
    "lm loss",
    "grad-norm",
    "learning-rate",
    "loss-scale",
    "consumed_samples",
    "batch-size",
    "lm loss validation",
)


def run(folder, *flags, code=0, base=TINY):
    """Run pretrain_gpt.py with --save and --load in `folder`; rows of metrics by iteration."""
    assert main([*map(str, (*base, "--save", folder, "--load", folder, *flags))]) == code
    rows = read_metrics(folder / "metrics.jsonl")
    return {row["iteration"]: {name: row.get(name) for name in RESULTS} for row in rows}


def start(flags):
    """Run pretrain_gpt.py with these flags, as one text; the exit code."""
    return main([*TINY, *flags.split()])


def newest(folder):
    """The name of the newest checkpoint."""
    return open_checkpoint(folder).path.name


def tensors(folder, step=None):
    """Every tensor of a checkpoint."""
    with open_checkpoint(folder, step) as checkpoint:
        return {name: checkpoint.read_tensor(name) for name in checkpoint.names}


def assert_same(a, b):
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder and the rows of the run of TINY alone."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder)


OVERFLOWS = ["--fp16", "--initial-loss-scale", 2**24, "--loss-scale-window", 3]
VARIANTS = {
    "bf16": ["--bf16"],
    "fp16-overflows": OVERFLOWS,
    "no-dropout-llama": "--hidden-dropout 0 --attention-dropout 0 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope "
    "--untie-embeddings-and-output-weights --disable-bias-linear --qk-layernorm "
    "--z-loss-coeff 1e-3".split(),
    "ramp-up": "--rampup-batch-size 2 2 16".split(),
}


@pytest.mark.default("bf16", "fp16-overflows", "ramp-up")
@pytest.mark.parametrize("name", VARIANTS)
def test_resume_is_bit_exact(tmp_path, name):
    """Stop at 5, continue in a second run: every metric, weight and moment equals the uninterrupted
    run's.
    """
    whole = run(tmp_path / "whole", *VARIANTS[name])
    run(tmp_path / "parts", *VARIANTS[name], "--exit-interval", 5)
    parts = run(tmp_path / "parts", *VARIANTS[name])
    assert repr(whole) == repr(parts) and len(whole) == 12  # as text NaN is equal to itself
    assert all(math.isfinite(row["lm loss"]) for row in whole.values())
    assert_same(tensors(tmp_path / "whole"), tensors(tmp_path / "parts"))
    if name == "fp16-overflows":
        assert len({row["loss-scale"] for row in whole.values()}) > 3


@pytest.mark.default("fp32")
@pytest.mark.parametrize(
    "flags",
    [[], ["--bf16", "--attention-dropout", 0, *VARIANTS["no-dropout-llama"][4:]]],
    ids=["fp32", "bf16-llama"],
)
def test_two_threads_give_the_same_bits_every_time(tmp_path, flags):
    """Tensors large enough that torch divides its work between threads."""
    large = "--hidden-size 128 --seq-length 128 --micro-batch-size 4 --vocab-size 999".split()
    large += ["--train-iters", 3, "--eval-iters", 0, *flags]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, second = (run(tmp_path / name, *large) for name in "ab")
    finally:
        torch.set_num_threads(before)
    assert repr(first) == repr(second)
    assert_same(tensors(tmp_path / "a"), tensors(tmp_path / "b"))


def test_the_rate_of_an_interval_counts_each_batch_of_a_ramp_up(tmp_path):
    run(tmp_path, "--rampup-batch-size", 2, 2, 16, "--log-interval", 12)
    (row,) = (row for row in read_metrics(tmp_path) if "iteration-time" in row)
    tokens = row["tokens-per-second-per-gpu"] * row["iteration-time"] * 12
    assert row["batch-size"] == 4 and tokens == pytest.approx(row["consumed-tokens"])


@dataclass(frozen=True)
class Counting:
    """A reader of a program: each sample counts from its number."""

    identity: str

    def windows(self, sample):
        return (sample[:, None] + np.arange(17)) % 31


def test_a_reader_in_python_is_named_and_its_change_is_refused(tmp_path, capsys):
    """The banner has no computed data of it; a resume continues with the same samples alone."""
    folder = str(tmp_path)
    parsed = parse_arguments([*map(str, TINY), "--save", folder, "--load", folder])
    config = parsed.config.with_fields("training", exit_interval=2)
    assert pretrain.pretrain(config, reader=Counting("first")) == 0
    assert "train: Counting, a reader in Python (first)" in capsys.readouterr().out
    assert pretrain.pretrain(config, reader=Counting("first")) == 0
    assert "at iteration 2; resumes bit for bit" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="Counting: not what .*accept-changed data"):
        pretrain.pretrain(config, reader=Counting("other"))


def test_exit_duration(tmp_path):
    rows = run(tmp_path, "--exit-duration-in-mins", "0.0001", "--train-iters", 12)
    assert list(rows) == [1] and newest(tmp_path) == "iter_0000001"


@pytest.mark.parametrize(
    "number, code, flags",
    [(signal.SIGUSR1, 85, []), (signal.SIGTERM, 143, ["--async-save"])],
)
def test_a_signal_saves_and_exits(tmp_path, monkeypatch, whole, number, code, flags):
    signalled = signalling(training_step.forward_backward, number, after=3)
    monkeypatch.setattr(training_step, "forward_backward", signalled)
    run(tmp_path, *flags, code=code)
    assert newest(tmp_path) == "iter_0000003"
    monkeypatch.undo()
    assert run(tmp_path) == whole[1]


def test_a_save_in_the_background_changes_nothing(tmp_path):
    """The run and every checkpoint of it are those of saves that wait; training does not wait for
    each of them.
    """
    flags = ["--bf16", "--train-iters", 6, "--save-interval", 2]
    assert run(tmp_path / "a", *flags) == run(tmp_path / "b", *flags, "--async-save")
    for iteration in (2, 4, 6):
        assert_same(tensors(tmp_path / "a", iteration), tensors(tmp_path / "b", iteration))


@pytest.mark.parametrize("after, flags", [(1, []), (3, ["--exit-interval", 12])])
def test_a_signal_during_an_evaluation(tmp_path, monkeypatch, whole, after, flags):
    """The evaluation is cut short, the run saved, and the exit code asks for a requeue, also where
    the run ends or exits then. The next start makes up for it before it trains, and where that is
    cut short, too, the start after it.
    """
    for calls in (after, 1):
        monkeypatch.setattr(loop, "evaluate", signalling(loop.evaluate, signal.SIGUSR1, calls))
        run(tmp_path, *flags, code=85)
        assert newest(tmp_path) == f"iter_{4 * after:07}"
        monkeypatch.undo()
    # there is nothing to evaluate any more
    assert start(f"--load {tmp_path} --eval-iters 0 --skip-train") == 0
    assert run(tmp_path) == whole[1]


def test_a_signal_in_the_second_of_two_sources(tmp_path, monkeypatch):
    """The next start evaluates both."""
    monkeypatch.setattr(prepare, "build_data", with_two_sources(prepare.build_data))
    signalled = signalling(loop.evaluate, signal.SIGUSR1, after=2)
    monkeypatch.setattr(loop, "evaluate", signalled)
    assert run(tmp_path, "--train-iters", 4, code=85)[4]["lm loss validation"] is None
    assert run(tmp_path, "--train-iters", 4)[4]["lm loss validation"] is not None


def test_signals_are_received_until_the_ranks_have_disconnected(monkeypatch):
    """One that comes while rank 0 closes its trackers kills no rank that waits for it."""
    found, before = [], signal.getsignal(signal.SIGUSR1)
    monkeypatch.setattr(
        pretrain, "disconnect", lambda: found.append(signal.getsignal(signal.SIGUSR1))
    )
    assert start("--train-iters 3") == 0
    assert isinstance(found[0].__self__, exit.ExitConditions)
    assert signal.getsignal(signal.SIGUSR1) == before


def test_no_evaluation_begins_after_a_signal(tmp_path, monkeypatch):
    """On a GPU too, which reads each exchange of requests one turn late."""
    read_at_once = training_step.AsyncHostCopy.__init__

    def read_late(self, parts):
        read_at_once(self, parts)
        self.is_synchronous = False

    monkeypatch.setattr(training_step.AsyncHostCopy, "__init__", read_late)
    signalled = signalling(training_step.forward_backward, signal.SIGUSR1, after=4)
    monkeypatch.setattr(training_step, "forward_backward", signalled)
    monkeypatch.setattr(loop, "run_micro_batches", None)
    run(tmp_path, code=85)
    assert newest(tmp_path) == "iter_0000004"


def test_a_signal_during_skip_train(monkeypatch, capsys):
    """The documented exit code, a message that claims no save, and no result."""
    monkeypatch.setattr(loop, "evaluate", signalling(loop.evaluate, signal.SIGTERM, after=1))
    assert start("--skip-train") == 143
    output = capsys.readouterr().out
    assert "received SIGTERM: ending the evaluation and exiting" in output
    assert output.rstrip().endswith(
        "SIGTERM received: exiting at iteration 0; the evaluation is incomplete"
    )
    assert "validation loss" not in output and "saving" not in output


def test_a_signal_during_the_test_split(tmp_path, monkeypatch, capsys):
    """After training: the last evaluation is not done, and a later start makes up for it."""
    monkeypatch.setattr(pretrain, "evaluate_all", signalling(loop.evaluate_all, signal.SIGUSR1, 1))
    run(tmp_path / "a", "--train-iters", 4, code=85)
    assert "exiting at iteration 4; the evaluation is incomplete" in capsys.readouterr().out
    monkeypatch.undo()
    assert start(f"--load {tmp_path / 'a'} --train-iters 4") == 0


def signalling(function, number, after):
    """`function`, sending this process a signal before its n-th call."""
    calls = 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == after:
            signal.raise_signal(number)
            time.sleep(0)
        return function(*args, **kwargs)

    return wrapped


def poison(monkeypatch, sample, value=math.nan):
    """Make the last layer's output of one training sample NaN."""
    original = HeadLayer.forward

    def forward(self, x, micro):
        if micro.training:
            x = x + torch.where(micro.dropout.sample_ids == sample, value, 0.0)[None, :, None]
        return original(self, x, micro)

    monkeypatch.setattr(HeadLayer, "forward", forward)


def test_nan_stops_and_names_the_samples(tmp_path, monkeypatch, capsys):
    """At once, for a launcher may kill the rank while it saves; trackers learn that it failed."""
    poison(monkeypatch, 11)
    codes, close = [], Tracker.close

    def closed(tracker):
        codes.append(tracker.exit_code)
        close(tracker)

    monkeypatch.setattr(Tracker, "close", closed)
    monkeypatch.setattr(pretrain, "finalize", lambda run: print("saves ended", file=sys.stderr))
    run(tmp_path, "--train-iters", 6, code=1)
    text = capsys.readouterr().err
    for words in ("iteration 3:", "micro-batch 1: loss, samples 10..11", "--nan-policy skip"):
        assert words in text
    assert "micro-batch 0" not in text
    assert text.index("iteration 3:") < text.index("saves ended") and codes == [1]


def test_nan_is_skipped_on_request(tmp_path, monkeypatch, capsys):
    poison(monkeypatch, 11)
    rows = run(tmp_path, "--train-iters", 6, "--nan-policy", "skip")
    assert "iteration 3" in capsys.readouterr().out
    assert not math.isfinite(rows[3]["lm loss"] or math.nan) and math.isfinite(rows[4]["lm loss"])
    monkeypatch.undo()
    # the skipped step did not advance it
    clean = run(tmp_path / "clean", "--train-iters", 6)
    assert rows[4]["learning-rate"] == clean[3]["learning-rate"]


def test_a_step_without_a_token_is_skipped(tmp_path, monkeypatch, capsys):
    original = Source.batch

    def batch(self, first, count):
        out = original(self, first, count)
        out.loss_mask[(out.sample_ids >= 4) & (out.sample_ids < 8)] = 0
        return out

    monkeypatch.setattr(Source, "batch", batch)
    run(tmp_path, "--train-iters", 4)
    assert "iteration 2: no valid token in samples 4..7" in capsys.readouterr().out


def test_missing_checkpoint_is_refused(tmp_path, capsys):
    missing = {tmp_path / "nothing": "no such folder", tmp_path: "no checkpoint there"}
    for folder, words in missing.items():
        assert start(f"--load {folder}") == 2
        message = capsys.readouterr().err
        assert f"--load {folder}" in message and words in message
    for folder in missing:
        assert start(f"--load {folder} --save {folder} --exit-on-missing-checkpoint") == 2
        assert "drop --exit-on-missing-checkpoint" in capsys.readouterr().err


def test_a_failed_save_does_not_stop_training(tmp_path, capsys, monkeypatch):
    """A full disk at iteration 4: the run continues, saves later, and logs it; when the last save
    fails the exit code is 1.
    """
    save_checkpoint = manager.save_checkpoint

    def full_at(full):
        def save(root, iteration, *rest, **ranks):
            if iteration == full:
                raise OSError(28, "No space left on device")
            return save_checkpoint(root, iteration, *rest, **ranks)

        monkeypatch.setattr(manager, "save_checkpoint", save)

    full_at(4)
    assert len(run(tmp_path / "a", "--save-interval", 4)) == 12
    shown = capsys.readouterr().out
    assert "iteration 4 was NOT saved" in shown and "No space left" in shown
    assert newest(tmp_path / "a") == "iter_0000012"
    full_at(12)
    run(tmp_path / "b", "--save-interval", 4, code=1)
    assert newest(tmp_path / "b") == "iter_0000008"
    assert "training is complete: exiting" in capsys.readouterr().out
    full_at(5)
    run(tmp_path / "c", "--exit-interval", 5, code=1)
    assert "--exit-interval 5 reached, but the last save failed: ex" in capsys.readouterr().out


def test_optimizer_state_that_is_not_there(tmp_path, capsys):
    run(tmp_path, "--exit-interval", 1, "--no-save-optim")
    run(tmp_path, code=2)
    assert "--no-load-optim" in capsys.readouterr().err
    assert len(run(tmp_path, "--no-load-optim", "--exit-interval", 2)) == 2


def test_only_mistakes_of_the_user_lose_their_traceback(tmp_path, capsys, monkeypatch):
    (tmp_path / "tokenizer.model").write_text("hello")
    flags = [word for word in TINY if word not in ("--vocab-size", "49")]
    model = str(tmp_path / "tokenizer.model")
    flags += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model]
    assert main(flags) == 2
    assert "not of --tokenizer-type SentencePieceTokenizer" in capsys.readouterr().err
    # a frame of megatron's
    inside = types.FunctionType((lambda *_: int("x")).__code__, vars(pretrain))
    monkeypatch.setattr(pretrain, "choose_device", inside)
    with pytest.raises(ValueError, match="invalid literal") as caught:
        main(TINY)
    assert not isinstance(caught.value, UserError)
    assert caught.value.__notes__ == ["[raised on rank 0]"]


def test_rank_0_lists_the_faults_of_flags(capsys, monkeypatch):
    assert main(["--lr", "1"]) == 2
    listed = capsys.readouterr().err.splitlines()
    assert len(listed) > 3
    monkeypatch.setattr("pretrain_gpt.PATIENCE", 0.0)  # of a rank that waits for rank 0
    second = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost "
    for variable in (second + "MASTER_PORT=1").split():
        monkeypatch.setenv(*variable.split("="))
    assert main(["--lr", "1"]) == 2
    assert capsys.readouterr().err.splitlines() == [f"rank 1: {listed[1].strip()}"]


@pytest.mark.parametrize(
    "flags",
    [[], OVERFLOWS],
    ids=["fp32", "fp16-skips-steps"],
)
def test_a_run_that_ends_between_two_log_lines_loses_no_loss(tmp_path, capsys, flags):
    """Cut at 3 and at 8 of 12, with a line every 5 and at the end: rows and lines are those of the
    run that was not cut.
    """

    def log_lines() -> list[tuple[str, str]]:
        fields = r"(lm loss: \S+).*(number of skipped.*nan iterations:\s+\d+)"
        return re.findall(fields, capsys.readouterr().out)

    every = ["--log-interval", 5, "--eval-interval", 12, *flags]
    whole = run(tmp_path / "whole", *every)
    expected = log_lines()
    for end in (["--exit-interval", 3], ["--exit-interval", 8], []):
        parts = run(tmp_path / "parts", *every, *end)
    # 3 and 8 have the times of their saves
    logged = {iteration: row for iteration, row in parts.items() if row["lm loss"] is not None}
    assert list(whole) == [5, 10, 12] and repr(logged) == repr(whole)
    assert log_lines() == expected
    assert compare_runs.main([str(tmp_path / "whole"), str(tmp_path / "parts")]) == 0
    assert bool(flags) == any("skipped iterations:   0" not in skips for _, skips in expected)


def with_two_sources(build):
    """`build`, with two sources of validation that differ."""

    def wrapped(*args):
        data = build(*args)
        (source,) = data.valid.values()
        other = dataclasses.replace(source, reader=data.train.reader)
        web = dataclasses.replace(source, weight=0.25, bytes_per_token=4.0)
        code = dataclasses.replace(other, weight=0.75, bytes_per_token=2.0)
        return dataclasses.replace(data, valid={"web": web, "code": code})

    return wrapped


def test_the_loss_of_a_blend_is_the_mean_of_its_sources_by_weight(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "build_data", with_two_sources(prepare.build_data))
    run(tmp_path, "--train-iters", 4)
    row = read_metrics(tmp_path)[-1]
    web, code = row["lm loss validation web"], row["lm loss validation code"]
    assert web != code and row["lm loss validation"] == 0.25 * web + 0.75 * code
    assert row["lm loss validation ppl"] == math.exp(row["lm loss validation"])
    assert row["bits-per-byte"] == pytest.approx(
        row["lm loss validation"] / math.log(2) / 2.5, rel=1e-15
    )
    shown = re.findall(r"validation loss at (iteration 4.*?) \|", capsys.readouterr().out)
    assert shown == ["iteration 4 on web", "iteration 4 on code", "iteration 4"]
