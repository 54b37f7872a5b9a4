"""For all tests: an end to tests that hang, the time each folder takes, the `gpu` marker, Gloo
worlds, and reproducible property tests.

A folder is tests/<name>, or tests/unit/<name>. The summary reports the minutes and the CPU time,
descendants included, that each used, and the tests above SLOW_SECONDS; no test fails for them,
because a busy machine makes every test slow.
A test that runs for HANG_MINUTES has hung: it fails there and then.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

import hypothesis
import pytest
import torch
from cpu_time import cpu_seconds
from selection import LONG_FILES, mark_tables

if torch.cuda.is_available():
    # for --deterministic-mode; torch looks once, at the first product of any test
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
else:
    # kernels run on CPU tensors; Triton reads it when it is first imported
    os.environ["TRITON_INTERPRET"] = "1"

TESTS = Path(__file__).resolve().parent
# on a quiet machine of two cores: what takes longer belongs into campaigns/, with a smaller case
# here
SLOW_SECONDS = 30
SCAN_SECONDS = 0.5  # tests of at least this length are charged for their descendants
HANG_MINUTES = 15  # many times what the longest test takes on two quiet cores

hypothesis.settings.register_profile("reproducible", derandomize=True, deadline=None)
hypothesis.settings.load_profile("reproducible")


def folder_of(path: Path) -> str:
    """`unit/data` of tests/unit/data/test_blend.py; `parity` of tests/parity/test_x.py."""
    parts = path.resolve().relative_to(TESTS).parts[:-1]
    return "/".join(parts[: 2 if parts[:1] == ("unit",) else 1])


class Clock:
    """Seconds that tests have used; ends a test that hangs."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = defaultdict(float)  # by test
        self.wall: dict[str, float] = defaultdict(float)
        # CPU seconds with those of descendants when they were last read, and of this process then
        self.scanned, self.own_then = cpu_seconds(), time.process_time()
        self.begun = self.own = 0.0  # when the test began: the time, CPU seconds of this process

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        self.begun, self.own = time.monotonic(), time.process_time()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        """Add the CPU time of the test, with its fixtures, to its last report."""
        report = yield
        report.cpu_seconds = self._used() if call.when == "teardown" else 0.0
        return report

    def _used(self) -> float:
        """CPU seconds of the test that ends; of a long one with those of descendants, which take
        milliseconds to read.
        """
        used = time.process_time() - self.own
        if time.monotonic() - self.begun < SCAN_SECONDS:
            return used
        scanned, self.scanned = self.scanned, cpu_seconds()
        between, self.own_then = self.own - self.own_then, time.process_time()
        return max(used, self.scanned - scanned - between)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item):
        return (yield from self._ends())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item):
        return (yield from self._ends())

    def _ends(self):
        def hangs(_signal: int, _frame: object) -> None:
            pytest.fail(f"this test has hung: it ran for {HANG_MINUTES} minutes")

        previous = signal.signal(signal.SIGALRM, hangs)
        signal.setitimer(signal.ITIMER_REAL, 60 * HANG_MINUTES)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Also of tests that ran in another process of pytest-xdist."""
        self.wall[report.nodeid] += report.duration
        # the report of a process that crashed has none
        self.cpu[report.nodeid] += getattr(report, "cpu_seconds", 0.0)
        if report.failed and "PRINT_FAILURES" in os.environ:  # pytest prints them at its end
            print(f"\n{report.longreprtext[-1500:]}", flush=True)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        load = os.getloadavg()[2]
        terminalreporter.section(
            f"CPU minutes and minutes by folder; load of the last 15 minutes: {load:.1f}"
        )
        minutes: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for name, seconds in self.wall.items():
            folder = folder_of(TESTS.parent / name.split("::")[0])
            for total in (minutes[f"tests/{folder}"], minutes["together"]):
                total[0] += self.cpu[name] / 60
                total[1] += seconds / 60
        for folder, (cpu, wall) in sorted(minutes.items()):
            terminalreporter.line(f"{cpu:6.2f} {wall:6.2f}  {folder}")
        for name, seconds in sorted(self.wall.items(), key=lambda test: -test[1]):
            if seconds > SLOW_SECONDS:
                terminalreporter.line(f"{seconds:6.0f} s, above {SLOW_SECONDS}: {name}")
        if file := terminalreporter.config.getoption("times"):
            times = {
                name: {"cpu_seconds": round(self.cpu[name], 2), "seconds": round(seconds, 2)}
                for name, seconds in self.wall.items()
            }
            Path(file).write_text(json.dumps(times, indent=1))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--times", metavar="FILE", help="write each test's CPU seconds and seconds as JSON"
    )


def give_way() -> None:
    """Let every process that this one starts go first. Ranks that exchange messages wait for each
    other at every step, so one that must wait for a turn of the processor holds up all; the tests
    of this process itself lose nothing by waiting.
    """
    with contextlib.suppress(OSError):  # some sandboxes have no such policy
        os.sched_setscheduler(0, os.SCHED_IDLE | os.SCHED_RESET_ON_FORK, os.sched_param(0))


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") and sys.platform == "linux":
        give_way()
    config.pluginmanager.register(Clock(), "clock")


def longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests of LONG_FILES in their order, then all others as they come."""
    place = {name: index for index, name in enumerate(LONG_FILES)}
    return sorted(items, key=lambda item: place.get(item.nodeid.split("::")[0], len(place)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Runs collect garbage several times: what was imported stays, and is not looked at again."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_tables(items)
    if hasattr(config, "workerinput"):  # a process of pytest-xdist
        items[:] = longest_first(items)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """Runs collect garbage several times: what earlier files left is not looked at again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def without_plan(request: pytest.FixtureRequest):
    """Small runs in this process without the plan of their banner, unless marked `planned`."""
    if "pretrain_gpt" not in sys.modules or request.node.get_closest_marker("planned"):
        yield
        return
    import programs

    with programs.without_plan():
        yield


@pytest.fixture
def one_thread():
    """torch with one thread here, as ranks and forked children have: sums over two have other bits,
    and a fork may not use its parent's threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def log_lines():
    """The lines that this process logs in the test, as they come."""
    from logged import logged

    with logged() as lines:
        yield lines


@pytest.fixture(scope="session")
def gloo_world():
    """`gloo_world(n).run(function, *args)`: on n processes that live as long as the session
    (tests/distributed/pool.py).
    """
    from distributed.pool import Worlds

    worlds = Worlds()
    yield worlds
    worlds.close()
