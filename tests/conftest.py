"""For all tests: an end to tests that hang, the `gpu` marker, Gloo worlds, and property tests that
repeat.

A test that runs for HANG_MINUTES has hung: it fails there and then.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys

import hypothesis
import pytest
import torch
from selection import LONG_FILES, mark_tables

if torch.cuda.is_available():
    # for --deterministic-mode; torch looks once, at the first product of any test
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
else:
    # kernels run on CPU tensors; Triton reads it when it is first imported
    os.environ["TRITON_INTERPRET"] = "1"

HANG_MINUTES = 15  # many times what the longest test takes on two quiet cores

hypothesis.settings.register_profile("reproducible", derandomize=True, deadline=None)
hypothesis.settings.load_profile("reproducible")


@contextlib.contextmanager
def time_limit():
    """Fails what runs for HANG_MINUTES where it is."""

    def hangs(_signal: int, _frame: object) -> None:
        pytest.fail(f"this test has hung: it ran for {HANG_MINUTES} minutes")

    previous = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, 60 * HANG_MINUTES)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item):
    with time_limit():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    with time_limit():
        return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Also of tests that ran in another process of pytest-xdist."""
    if report.failed and "PRINT_FAILURES" in os.environ:  # pytest prints them at its end
        print(f"\n{report.longreprtext[-1500:]}", flush=True)


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
