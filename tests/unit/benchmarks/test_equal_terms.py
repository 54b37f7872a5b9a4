"""Programs that are compared run on equal terms: kept memory, buckets, threads."""

from __future__ import annotations

from pathlib import Path

from megatron.benchmarks import checkpoint, training


def test_every_program_is_started_with_them(monkeypatch):
    given = []

    def popen(*arguments, env, **settings):
        given.append(env)
        raise InterruptedError

    monkeypatch.setattr(training.subprocess, "Popen", popen)
    work = training.SETTINGS["fp32"]
    for who in ("ours", "plain loop"):
        try:
            training.run(who, work, Path("peers"), Path("start"))
        except InterruptedError:
            pass
    assert len(given) == 2 and all(env.items() >= training.KEPT_MEMORY.items() for env in given)


def test_checkpoints_are_compared_with_equal_threads():
    assert {"ours, 1 thread", "raw pwrite, 2 threads"} <= set(checkpoint.SYSTEMS)
    rows = {what: (above, below) for what, above, below, *_ in checkpoint.goals("tmpfs")}
    assert rows["torch.save's time by ours with 1 thread"] == ("torch.save", "ours, 1 thread")
    assert rows["DCP's time by ours with 1 thread"] == ("DCP", "ours, 1 thread")
    assert rows["time by raw pwrite's with 2 threads"] == ("ours", "raw pwrite, 2 threads")
