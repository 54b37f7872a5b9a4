"""tools/preflight.py on nodes with networks of their own: each fault is named, with its node, and
no other. That nodes in order are not named is tested on a real Slurm (tests/slurm).

The nodes share two cores, so that a speed counts as slow only below a fifth of the others'
(--tolerance); the link that is slowed carries a fiftieth.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from network import Network, missing_namespaces

NODES = 3
FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--micro-batch-size 1 --global-batch-size 12 --train-iters 4 --lr 1e-2 --eval-iters 0
--tokenizer-type NullTokenizer --vocab-size 49 --tolerance 0.8""".split()
CLOCK_AHEAD = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, id, now);
    if (id == CLOCK_REALTIME) now->tv_sec += 120;
    return failed;
}
"""
ANSWER = 12.0  # --timeout
ENDS = 400.0  # seconds in which a preflight ends on a busy machine


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Three nodes. Skipped where none can be made, with the reason."""
    reason = missing_namespaces()
    if reason is not None:
        pytest.skip(f"no nodes here: {reason}")
    made = Network(NODES)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def clock_ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library to preload: the C library's wall clock is 120 s ahead. (libfaketime 0.9.10, which
    does the same, makes time.sleep of Python 3.11 fail.)
    """
    if shutil.which("cc") is None:
        pytest.skip("no C compiler (cc), which the library of another clock needs")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(CLOCK_AHEAD)
    library = folder / "clock.so"
    command = ["cc", "-shared", "-fPIC", "-o", str(library), str(folder / "clock.c")]
    subprocess.run(command, check=True, capture_output=True)
    return library


class Nodes:
    """A run folder and data that all nodes see, and their processes."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.report, self.cache, self.data = (folder / x for x in ("report.json", "cache", "data"))
        self.cache.mkdir()
        for end in (".bin", ".idx"):
            self.data.with_suffix(end).write_bytes(b"0" * 100)
        words = f"""--data-path {self.data} --timeout {ANSWER} --start-timeout {ENDS}
            --save {folder}/run --report {self.report} --folders {self.cache}"""
        self.flags = [*FLAGS, *words.split()]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int, before: str = "", **environment: str) -> None:
        """The rank of a node, behind these shell commands."""
        output = self.folder / f"output-{node}"
        self.processes[node] = self.network.start(node, self.flags, output, before, environment)

    def output(self, node: int) -> str:
        return (self.folder / f"output-{node}").read_text()

    def end(self, *nodes: int) -> list[int]:
        """Exit codes of these nodes, when they have ended."""
        until = time.monotonic() + ENDS
        return [self.processes[node].wait(until - time.monotonic()) for node in nodes]

    def faults(self) -> dict[str, list[str]]:
        """The texts of the faults by node, without its name, as the report has them."""
        found: dict[str, list[str]] = {}
        for fault in json.loads(self.report.read_text())["faults"]:
            found.setdefault(fault["node"], []).append(fault["text"].partition(": ")[2])
        return found


@pytest.fixture
def nodes(network: Network, tmp_path: Path) -> Iterator[Nodes]:
    """A run on three nodes, none of which has been started."""
    made = Nodes(network, tmp_path)
    try:
        yield made
    finally:
        for process in made.processes.values():
            process.kill()  # those that are stopped too
            process.wait()


def wait_until(condition: Callable[[], Any]) -> Any:
    """What it gives, when it is met."""
    until = time.monotonic() + ENDS
    while not (met := condition()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return met


@pytest.mark.full
def test_a_slow_link_a_full_disk_another_torch_and_a_wrong_clock(nodes, clock_ahead, tmp_path):
    """All in one preflight. The link goes through tc's token bucket; the disk is a small tmpfs; the
    node's own torch/version.py, which torch reads, names another version; its
    clock is read through a library that adds 120 s.
    """
    theirs = Path(torch.__file__).with_name("version.py")
    other = tmp_path / "version.py"
    other.write_text(theirs.read_text() + "\n__version__ = '2.12.9'\n")
    nodes.start(0)
    nodes.start(1, f"mount -t tmpfs -o size=64k tmpfs '{nodes.cache}'")
    nodes.start(2, f"mount --bind '{other}' '{theirs}'", LD_PRELOAD=str(clock_ahead))
    with nodes.network.slow(1, "200mbit"):
        assert nodes.end(0, 1, 2) == [3, 3, 3], nodes.output(0)
    faults = nodes.faults()
    assert faults.keys() == {"n1", "n2"}, nodes.output(0)
    full, slow = faults["n1"]
    assert full.startswith(f"{nodes.cache}: 1 MiB cannot be written into it (No space left")
    assert slow.startswith("network is slow with every partner: 0.0"), slow
    version, clock = faults["n2"]
    assert version.startswith(f"torch: 2.12.9; the others: {torch.__version__}")
    assert clock.startswith(("its clock is 120.", "its clock is 119.9")) and "ahead" in clock
    assert nodes.output(0).splitlines()[-1] == "preflight: leave out n1,n2"
    assert not any("preflight" in nodes.output(node) for node in (1, 2))  # one rank prints
    assert not list((tmp_path / "run").iterdir()) and not list(nodes.cache.iterdir())
    for found in json.loads(nodes.report.read_text())["nodes"].values():
        assert all(found[kind] > 0 for kind in ("GEMM", "copy", "network"))


def writer_of(fifo: Path) -> int | None:
    """The other end of a FIFO, once a process waits in opening it."""
    with suppress(OSError):  # it has no reader yet
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    return None


@pytest.mark.full
def test_a_stopped_rank_and_a_file_that_does_not_come_back(nodes, tmp_path):
    """On two nodes reading the data does not end, as on a dead file server (here: a FIFO), and one
    of the two is stopped there. No rank waits for longer than the timeout.
    """
    data = nodes.data.with_suffix(".bin")
    nodes.start(0)
    for node in (1, 2):
        os.mkfifo(tmp_path / f"fifo-{node}")
        nodes.start(node, f"mount --bind '{tmp_path}/fifo-{node}' '{data}'")
    end = wait_until(lambda: writer_of(tmp_path / "fifo-1"))
    os.kill(nodes.processes[1].pid, signal.SIGSTOP)
    assert nodes.end(0, 2) == [3, 3], nodes.output(0)
    os.close(end)
    faults = nodes.faults()
    assert faults.keys() == {"n1", "n2"}, nodes.output(0)
    assert faults["n1"][0].startswith("rank 1 arrived, and fell silent in the look at its node")
    assert faults["n2"] == [f"did not come back from reading {data}"]
    assert nodes.output(0).splitlines()[-1] == "preflight: leave out n1,n2"


@pytest.mark.campaign
def test_rank_0_is_stopped(nodes, tmp_path):
    """The store is silent with it. No launcher is there that would know its node's name."""
    nodes.flags += ["--start-timeout", "60"]
    for node in range(NODES):
        nodes.start(node)
    seen = tmp_path / "run"
    wait_until(lambda: len(list(seen.glob(".preflight-seen-*"))) == NODES)  # all have come
    os.kill(nodes.processes[0].pid, signal.SIGSTOP)
    assert nodes.end(1, 2) == [2, 2]
    message = f"{nodes.network.address}: rank 0, which the others report to, does not answer"
    assert message in nodes.output(1) and message in nodes.output(2)
