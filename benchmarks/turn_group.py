"""The processes of one system that take turns with others on one machine: they do something when
they are asked to and sleep in between.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import threading
from contextlib import suppress
from typing import Any

PATIENCE = 300.0  # seconds for a turn
# What megatron/distributed/setup.py asks of glibc for our own process: freed memory stays with a
# process. Every program that is compared gets it, through the environment.
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": f"{2**31 - 1}", "MALLOC_TRIM_THRESHOLD_": f"{2**31 - 1}"}


class Group:
    """Ranks of one command, with the variables of torchrun and those of `environ`."""

    def __init__(
        self, system: str, command: list[str], processes: int, threads: int = 1, **environ: str
    ):
        self.system = system
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.errors = tempfile.TemporaryFile("w+")
        self.ranks = []
        for rank in range(processes):
            variables = {
                **os.environ,
                **environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(threads),
                "DS_ACCELERATOR": "cpu",
                **KEPT_MEMORY,
            }
            self.ranks.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self.errors,
                    text=True,
                    env=variables,
                    cwd=tempfile.gettempdir(),
                )
            )

    def turn(self, what: str) -> list[dict[str, Any]]:
        """Every rank's answer to a line, itself a line `TURN {...}`. Raises RuntimeError when a
        rank ends instead.
        """
        for rank in self.ranks:
            with suppress(BrokenPipeError):  # a rank that has ended is reported below
                rank.stdin.write(what + "\n")
                rank.stdin.flush()
        answers, lines = [], []
        patience = threading.Timer(PATIENCE, self.kill)
        patience.start()
        for rank in self.ranks:
            for line in rank.stdout:
                if line.startswith("TURN "):
                    answers.append(json.loads(line.removeprefix("TURN ")))
                    break
                lines.append(line)
            else:
                patience.cancel()
                self.errors.seek(0)
                raise RuntimeError(
                    f"{self.system} ended:\n{''.join(lines[-40:])}{self.errors.read()[-4000:]}"
                )
        patience.cancel()
        return answers

    def rest(self) -> list[str]:
        """What rank 0 prints when there are no more turns, to its end."""
        for rank in self.ranks:
            rank.stdin.close()
        patience = threading.Timer(PATIENCE, self.kill)
        patience.start()
        lines = [*self.ranks[0].stdout]
        patience.cancel()
        return lines

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def end(self) -> None:
        """Nothing is left to save, and DeepSpeed's threads sometimes stay for long."""
        self.kill()
        for rank in self.ranks:
            rank.wait()
            with suppress(BrokenPipeError):
                rank.stdin.close()
            rank.stdout.close()
        self.errors.close()
