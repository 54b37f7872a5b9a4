"""For all tests: an end to tests that hang, the time each folder takes, the `gpu` marker, Gloo worlds, and reproducible property tests.

A folder is tests/<name>, or tests/unit/<name>. tests/minutes.json allots each its minutes on two quiet cores. The summary reports the minutes
that were used and marks folders above theirs; no test fails for them, because a busy machine makes every test slow. A test that runs for
HANG_MINUTES has hung: it fails there and then.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from pathlib import Path

import hypothesis
import pytest
import torch

if torch.cuda.is_available():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for --deterministic-mode; torch looks once, at the first product of any test
else:
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on CPU tensors; Triton reads it when it is first imported

TESTS = Path(__file__).resolve().parent
MINUTES: dict[str, float] = json.loads((TESTS / "minutes.json").read_text())
HANG_MINUTES = 15  # many times what the longest test takes on two quiet cores

hypothesis.settings.register_profile("reproducible", derandomize=True, deadline=None)
hypothesis.settings.load_profile("reproducible")


def folder_of(path: Path) -> str:
    """`unit/data` of tests/unit/data/test_blend.py; `parity` of tests/parity/test_x.py."""
    parts = path.resolve().relative_to(TESTS).parts[:-1]
    return "/".join(parts[: 2 if parts[:1] == ("unit",) else 1])


class Clock:
    """Seconds that each folder's tests have used; ends a test that hangs."""

    def __init__(self) -> None:
        self.used: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item):
        return (yield from self._within_time(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item):
        return (yield from self._within_time(item))

    def _within_time(self, item: pytest.Item):
        def hangs(_signal: int, _frame: object) -> None:
            pytest.fail(f"this test has hung: it ran for {HANG_MINUTES} minutes")

        previous = signal.signal(signal.SIGALRM, hangs)
        signal.setitimer(signal.ITIMER_REAL, 60 * HANG_MINUTES)
        begun = time.monotonic()
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
            self.used[folder_of(item.path)] += time.monotonic() - begun

    def pytest_terminal_summary(self, terminalreporter) -> None:
        load = os.getloadavg()[2]
        title = f"minutes used, of those in tests/minutes.json; load of the last 15 minutes: {load:.1f}"
        terminalreporter.section(title)
        for folder, seconds in sorted(self.used.items()):
            over = " ABOVE ITS MINUTES" if seconds > 60 * MINUTES[folder] else ""
            line = f"{seconds / 60:6.2f} of {MINUTES[folder]:5.2f}  tests/{folder}{over}"
            terminalreporter.line(line)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="K/N", help="every N-th test, from the K-th on: what is compiled for a GPU takes several processes")


def shard_of(items: list[pytest.Item], shard: str) -> list[pytest.Item]:
    """Raises pytest.UsageError for what is no K/N with 1 <= K <= N."""
    first, _, step = shard.partition("/")
    if not (first.isdigit() and step.isdigit() and 1 <= int(first) <= int(step)):
        raise pytest.UsageError(f"--shard {shard}: expected K/N, as in 1/4 to 4/4")
    return items[int(first) - 1 :: int(step)]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Clock(), "clock")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("shard"):
        items[:] = shard_of(items, config.getoption("shard"))
    missing = {folder_of(item.path) for item in items} - MINUTES.keys()
    if missing:
        raise pytest.UsageError(f"tests/minutes.json allots no time to {', '.join(sorted(missing))}: add a line")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def one_thread():
    """torch with one thread here, as ranks and forked children have: sums over two have other bits, and a fork may not use its parent's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def gloo_world():
    """`gloo_world(n).run(function, *args)`: on n processes that live as long as the session (tests/dist/pool.py)."""
    from dist.pool import Worlds

    worlds = Worlds()
    yield worlds
    worlds.close()
