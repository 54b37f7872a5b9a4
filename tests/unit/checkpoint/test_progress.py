"""Lines about a save: at most one every ten seconds, with figures that are right."""

from __future__ import annotations

from megatron.checkpoint.files import WriteProgress
from megatron.checkpoint.manager import Saved


def test_lines_of_a_long_save(log_lines):
    now = [100.0]
    progress = WriteProgress(7, 8_000_000_000, clock=lambda: now[0])
    for _ in range(320):  # 25 MB in 1/8 s each
        now[0] += 0.125
        progress(25_000_000)
    assert log_lines == [
        f" saving iteration 7: {done:.2f} of 8.00 GB of this rank, 0.20 GB/s, ETA {eta} s"
        for done, eta in ((2, 30), (4, 20), (6, 10))
    ]


def test_a_short_save_logs_nothing_and_the_end_is_not_progress(log_lines):
    now = [0.0]
    progress = WriteProgress(7, 100, clock=lambda: now[0])
    for _ in range(10):
        now[0] += 0.9
        progress(9)
    now[0] = 60.0
    progress(10)
    assert log_lines == [] and progress.done == 100


def test_the_line_of_a_save():
    text = " saved checkpoint run/iter_0000100: 14.00 GB in 8.0 s, 1.75 GB/s; training waited 0.4 s"
    assert str(Saved("run/iter_0000100", 14_000_000_000, 8.0, 0.4)) == text
