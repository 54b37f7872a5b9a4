"""Nodes of a cluster on one machine: a network namespace for each, joined by a switch in a
separate namespace; `close` removes all of it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from programs import rank_environment

ROOT = Path(__file__).resolve().parents[2]
PORT = 29555  # of the namespaces, which share none with this machine


def missing_namespaces() -> str | None:
    """Why no nodes can be made here; None when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not found (Debian: iproute2, util-linux)"
    name = f"pf{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return None if done.returncode == 0 else f"`ip netns add`: {done.stderr.strip()}"


def run(*words: str) -> None:
    """A command that must succeed."""
    subprocess.run(words, check=True, capture_output=True)


class Network:
    """`nodes` namespaces, n0 the first, whose address is `address`."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.prefix = f"pf{os.getpid()}-"
        self.address = "10.77.0.1"
        self.spaces: list[str] = []
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        switch = self._space("switch")
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        for number in range(self.nodes):
            space = self._space(f"n{number}")
            port = f"port{number}"
            ends = ["eth0", "netns", space, "type", "veth", "peer", "name", port, "netns", switch]
            run("ip", "link", "add", *ends)
            run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            run("ip", "-n", space, "address", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                run("ip", "-n", space, "link", "set", link, "up")

    def _space(self, name: str) -> str:
        run("ip", "netns", "add", self.prefix + name)
        self.spaces.append(self.prefix + name)
        return self.spaces[-1]

    def close(self) -> None:
        """Remove the namespaces, and with them all links."""
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)

    @contextmanager
    def slow(self, node: int, rate: str) -> Iterator[None]:
        """In the block, what a node sends goes through a token bucket of this rate, as
        `200mbit`.
        """
        shaped = ["rate", rate, "burst", "64kb", "latency", "400ms"]
        space = self.prefix + f"n{node}"
        run("tc", "-n", space, "qdisc", "add", "dev", "eth0", "root", "tbf", *shaped)
        try:
            yield
        finally:
            run("tc", "-n", space, "qdisc", "del", "dev", "eth0", "root")

    def start(
        self,
        node: int,
        flags: list[str],
        output: Path,
        before: str = "",
        environment: dict[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """A rank of tools/preflight.py, alone on its node, in a separate mount namespace, in
        which the shell commands `before` are carried out first.
        """
        own = {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address,
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",  # what is mounted over the code stays on the node
        }
        of_rank = rank_environment(node, self.nodes, PORT, **own, **(environment or {}))
        program = [sys.executable, str(ROOT / "tools/preflight.py"), "--node", f"n{node}", *flags]
        command = f"{before}\nexec {shlex.join(program)}"
        with output.open("wb") as to:
            return subprocess.Popen(
                ["ip", "netns", "exec", f"{self.prefix}n{node}"]
                + ["unshare", "--mount", "--propagation", "private", "bash", "-ec", command],
                env=of_rank,
                stdout=to,
                stderr=subprocess.STDOUT,
            )
