"""One run at a time writes to a --save folder: `in_use.json` there names the run, which renews the
file while it lives (docs/checkpoint.md).

Many shared file systems have no locks, and the clocks of machines differ: age is measured by the
file system's own clock. Nothing here imports torch.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from megatron.checkpoint.files import make_root, new_file, write_all
from megatron.checkpoint.manifest import CheckpointError

logger = logging.getLogger(__name__)

NAME = "in_use.json"
RENEW_S = 5.0  # between two renewals
STALE_S = 60.0  # without a renewal, after which the owner counts as dead
POLL_S = 0.5  # between two looks at the lease of an owner that may be alive
FIELDS = ("token", "run", "machine", "pid", "job")


def describe_run(job: str) -> dict[str, str]:
    """This process as the content of a lease. `machine`: boot id and namespace of process ids,
    empty without /proc; `job`: Slurm's, empty outside of it.
    """
    pid = os.getpid()
    run = f"process {pid} on {socket.gethostname()}{f' (Slurm job {job})' if job else ''}"
    since = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        machine = ""
    values = secrets.token_hex(8), f"{run}, since {since}", machine, str(pid), job
    return dict(zip(FIELDS, values, strict=True))


def read_owner(path: Path) -> dict[str, str]:
    """The run that holds a lease; empty texts when the file is missing, incomplete or no lease."""
    try:
        found = json.loads(path.read_bytes()[:4096])
        return {name: re.sub(r"[^\x20-\x7e]", "?", found[name]) for name in FIELDS}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return dict.fromkeys(FIELDS, "") | {"run": f"a run that cannot be read from {NAME}"}


class Lease:
    """A --save folder that this process alone writes to, until `release`."""

    def __init__(self, path: Path, token: str):
        self.path, self.token, self.lost = path, token, False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while not self._end.wait(RENEW_S):
            if read_owner(self.path)["token"] not in (self.token, ""):
                self.lost = True
                return
            with suppress(OSError):  # the file system may be unavailable for a while
                os.utime(self.path)

    def check(self) -> None:
        """Raise CheckpointError when another run has taken the folder over."""
        if self.lost:
            raise CheckpointError(
                f"{self.path}: another run has taken this folder over "
                f"({read_owner(self.path)['run']}), since this one had not renewed its lease for "
                f"{STALE_S:g} s; it ends here, so that the two do not mix. Its checkpoints are "
                "whole."
            )

    def release(self) -> None:
        """Give the folder up; the file goes unless another run has taken it over."""
        self._end.set()
        self._thread.join()
        if read_owner(self.path)["token"] == self.token:
            with suppress(OSError):
                self.path.unlink()


def take_lease(root: str | Path, job: str) -> Lease:
    """Become the only writer of `root`, which is made if needed; `job` is the Slurm job, if any.

    A dead owner is replaced: at once if its process has ended on this machine or it was an earlier
    start of the same Slurm job, otherwise when it has not renewed its lease for STALE_S seconds.
    Raises CheckpointError, which names the owner, when that is alive; OSError.
    """
    path = Path(root, NAME)
    make_root(path.parent)
    me = describe_run(job)
    while True:
        try:
            with new_file(path) as file:
                write_all(file, [memoryview(json.dumps(me, indent=1).encode() + b"\n")])
            return Lease(path, me["token"])
        except FileExistsError:
            with suppress(FileNotFoundError):  # it was released just now
                _remove_dead(path, me)


def _remove_dead(path: Path, me: dict[str, str]) -> None:
    """Remove the lease of a dead owner. Raises CheckpointError when it is alive."""
    aside = path.with_name(f".{NAME}.{me['token']}")
    owner, judged = read_owner(path), _stamp(path)
    try:
        with new_file(aside) as file:
            age = (os.fstat(file).st_mtime_ns - judged[1]) / 1e9
        why = _death(owner, me, age) or _watch(path, owner["run"], judged)

        # Of two runs that judge the same owner, one removes its lease. The other may catch the new
        # lease instead, and puts it back.
        os.rename(path, aside)
        if _stamp(aside) != judged:
            with suppress(OSError):
                os.link(aside, path)
            raise _in_use(path, read_owner(aside)["run"])
    finally:
        aside.unlink(missing_ok=True)
    logger.info(f" --save {path.parent}: taken over from {owner['run']}: {why}")


def _death(owner: dict[str, str], me: dict[str, str], age: float) -> str:
    """Why an owner is known to be dead; empty when it may be alive."""
    if owner["machine"] and owner["machine"] == me["machine"]:
        try:
            os.kill(int(owner["pid"]), 0)
        except (ProcessLookupError, ValueError, OverflowError):
            return "it has ended"
        except OSError:
            pass  # another user's, which /proc may hide
        return ""  # its number may be another one's by now: whether it renews shows
    if owner["job"] and owner["job"] == me["job"]:
        return "it was an earlier start of the same Slurm job"
    return f"it has renewed its lease {age:.0f} s ago for the last time" if age > STALE_S else ""


def _watch(path: Path, run: str, judged: tuple[int, int]) -> str:
    """Why an owner is dead, after STALE_S seconds. Raises CheckpointError when it renews."""
    logger.info(f" --save {path.parent}: waiting up to {STALE_S:g} s to see whether {run} is alive")
    end = time.monotonic() + STALE_S
    while time.monotonic() < end:
        time.sleep(POLL_S)
        if _stamp(path) != judged:
            raise _in_use(path, read_owner(path)["run"])
    return f"it did not renew its lease for {STALE_S:g} s"


def _stamp(path: Path) -> tuple[int, int]:
    """Which file it is, and when it was renewed, in ns."""
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns


def _in_use(path: Path, run: str) -> CheckpointError:
    return CheckpointError(
        f"--save {path.parent}: another run is writing there: {run}. Two runs would mix their "
        "metrics and checkpoints: give this one another --save folder, or end that one first. If "
        f"it is dead for certain, delete {path}"
    )
