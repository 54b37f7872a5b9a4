"""The writer process of a background save dies at any call or with its trainer, meets a full disk
or a power loss: training continues or ends, what is on the disk is whole, and nothing is left.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import saving_jobs
import torch.distributed as dist
from disk_model import CALLS, Disk
from kill_writer import campaign, check, children, start_rank, verdict
from saving_jobs import JOBS, contents, step
from test_kill_writer import recoveries

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "checkpoint"))

from checkpoint_cases import all_ranks, mounted
from logged import logged

from megatron.checkpoint import background
from megatron.checkpoint.manager import CheckpointManager, staging_bytes
from megatron.checkpoint.manifest import iteration_folder, list_iterations
from megatron.checkpoint.ranks import SINGLE_RANK, Ranks
from megatron.checkpoint.writer import save_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("mode", "writer", "ranks", "kills", "seed"),
    [
        ("async", "real", 2, 4, 3),
        pytest.param("local", "real", 2, 4, 1, marks=pytest.mark.full),
        ("local", "xor", 3, 3, 4),  # nodes are lost, too
    ],
)
@pytest.mark.default("async-real-2-4-3", "local-xor-3-3-4")
def test_random_kills(tmp_path, mode, writer, ranks, kills, seed):
    settings = JOBS[mode][writer], tmp_path / "run", lambda line: None, ranks, mode
    assert campaign(kills, seed, *settings) == []


# ---- a writer process that begins with something of ours -----------------------------------------


@contextmanager
def writers_begin_with(prologue: str):
    """The writer processes started in the block execute `prologue` first."""
    real = subprocess.Popen

    def popen(command, **options):
        assert command[1] == "-c"
        return real([*command[:2], f"{prologue}\n{command[2]}"], **options)

    with mock.patch.object(background.subprocess, "Popen", popen):
        yield


def before_call(number: int, what: str) -> str:
    """A prologue: `what` happens before the process's own file call `number`."""
    return f"""if True:
        import os, signal
        left = {number}

        def changed(real):
            def call(*args, **kwargs):
                global left
                left -= 1
                if left < 0:
                    {what}
                return real(*args, **kwargs)
            return call

        for name in {CALLS}:
            setattr(os, name, changed(getattr(os, name)))"""


@contextmanager
def saver_at(root: Path, ranks: Ranks = SINGLE_RANK):
    """A CheckpointManager and the list of what it logs."""
    saver = CheckpointManager(root, ranks, staging_bytes(contents(1, ranks)[0], None))
    try:
        with logged() as lines:
            yield saver, lines
    finally:
        saver.close()


def traces(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.full)])
def test_the_writer_dies_before_its_calls(tmp_path, monkeypatch, every):
    """The save fails, or was complete; the next one succeeds, and nothing is left."""
    monkeypatch.setattr(saving_jobs, "SHAPES", {"w": (40, 8)})
    outcomes = []
    for number in range(0, 100, every):
        root = tmp_path / str(number)
        with ExitStack() as stack:
            with writers_begin_with(before_call(number, "os.kill(os.getpid(), signal.SIGKILL)")):
                saver, lines = stack.enter_context(saver_at(root))
                saver.save(1, *contents(1))
                outcomes.append(saver.finalize())
            if outcomes[-1]:
                break
            [line] = lines
            assert "iteration 1 was NOT saved" in line
            assert "the process that writes checkpoints was killed by signal 9 (SIGKILL)" in line
            assert "; when that was for lack of memory, give --async-save-host-memory" in line
            if every > 1 or number % 3 == 0:
                saver.save(2, *contents(2))
                assert saver.finalize() and verdict(root, 2) == (2, None) and traces(root) == []
    assert 12 < number < 99


def lone_trainer(root: Path, first: int, ranks: Ranks, report) -> None:
    """One background save after a synchronous one."""
    save_checkpoint(root, 1, *contents(1))
    with saver_at(root) as (saver, _):
        saver.save(2, *contents(2))
        saver.finalize()


# ---- a trainer that dies -------------------------------------------------------------------------


def state_of(process: int) -> str:
    """Letter of /proc; empty when it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0].strip("Z")
    except OSError:
        return ""


def wait_for(condition, patience: float = 300.0) -> bool:
    """Whether it is met in time."""
    end = time.monotonic() + patience
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return met


STOP_AT_OPEN = f"""import sys, os, signal; sys.path.insert(0, {str(background.ROOT)!r})
real = os.open; os.open = lambda *args: (os.kill(os.getpid(), signal.SIGSTOP), real(*args))[1]"""


def test_a_writer_dies_with_its_trainer(tmp_path):
    """Even when it is stopped."""
    with open(os.devnull, "w") as ignored, writers_begin_with(STOP_AT_OPEN):
        trainer = start_rank(lone_trainer, tmp_path / "run", 1, 0, 1, ignored.fileno())
    try:
        assert wait_for(lambda: "T" in map(state_of, children(trainer.pid)))
        (writer,) = children(trainer.pid)
    finally:
        trainer.kill()
        trainer.join()
    assert wait_for(lambda: not state_of(writer))


# ---- a full disk ---------------------------------------------------------------------------------


def train_with_little_room(root: Path, filler: Path) -> tuple[list[str], list[int], list[str]]:
    """Two ranks save iteration 1; then there is no room for iteration 2, and then there is for 3.
    (lines logged, iterations there, traces).
    """
    ranks = all_ranks()
    with saver_at(root, ranks) as (saver, lines):
        for iteration in (1, 2, 3):
            if ranks.first and iteration == 2:
                filler.write_bytes(bytes(8 << 20))
            elif ranks.first:
                filler.unlink(missing_ok=True)
            dist.barrier()
            saver.save(iteration, *contents(iteration, ranks))
            assert saver.pending is not None
            while saver.pending is not None:
                step(saver)
            dist.barrier()
            assert saver.went_well == (iteration != 2) and traces(root) == []
        dist.barrier()
        return lines, list_iterations(root), traces(root)


def test_a_full_disk(gloo_world, tmp_path):
    """One error on all ranks; training continues; what was there stays; the next save succeeds."""
    with mounted(tmp_path, "size=11m"):
        folders = tmp_path / "run", tmp_path / "filler"
        (first, *there), (second, *_) = gloo_world(2).run(train_with_little_room, *folders)
        assert there == [[3, 1], []]
        wrong = [line for line in first if "NOT saved" in line]
        assert wrong == second and len(wrong) == 1
        assert "the checkpoint of iteration 2 was not saved: No space left on device" in wrong[0]
        assert wrong[0].endswith("Older checkpoints are untouched (newest: iteration 1).")
        for iteration in (1, 3):
            assert check(tmp_path / "run" / iteration_folder(iteration), 0) is None


# ---- power loss ----------------------------------------------------------------------------------

RECORD = """import os, pickle
log, write = os.open({path!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT), os.write

def recorded(name, real):
    def call(*args, **kwargs):
        shown = (args[0], bytes(args[1]), args[2]) if name == "pwrite" else args
        result = real(*args, **kwargs)
        write(log, pickle.dumps((os.getpid(), name, result, shown)))
        return result
    return call

for name in {calls}:
    setattr(os, name, recorded(name, getattr(os, name)))
"""


def test_power_loss_after_any_call_of_a_background_save(tmp_path, monkeypatch):
    """Of trainer and writer, and at the end."""
    monkeypatch.setattr(saving_jobs, "SHAPES", {"w": (700, 400), "v": (700,)})  # more than a chunk
    root, path = tmp_path / "run", tmp_path / "calls"
    root.mkdir()
    record = RECORD.format(path=str(path), calls=CALLS)
    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, getattr(os, name))  # put back in the end
        scope: dict = {}
        exec(record, scope)
        with writers_begin_with(record), saver_at(root) as (saver, _):
            for iteration in (1, 2):
                saver.save(iteration, *contents(iteration))
                assert saver.finalize()
                os.write(scope["log"], pickle.dumps((0, "acknowledge", iteration, ())))
    events = []
    with open(path, "rb") as file:
        while file.peek(1):
            events.append(pickle.load(file))
    disk = Disk(root)
    disk.replay(events)
    assert len({process for process, *_ in events}) == 3 and len(disk.crashes) > 40
    assert recoveries(disk, tmp_path) == []
