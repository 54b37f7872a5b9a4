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
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from megatron.checkpoint.files import make_root, new_file, write_all
from megatron.checkpoint.manifest import CheckpointError

logger = logging.getLogger(__name__)

NAME = "in_use.json"
RENEWED = 10.0  # seconds between two renewals
STALE = 60.0  # seconds without a renewal after which the owner counts as dead
LOOK = 0.5  # seconds between two looks at the lease of an owner that may be alive
LARGEST = 4096  # bytes of the file


@dataclass(frozen=True)
class Owner:
    """A run that writes to a folder. Machine, process id and start time identify its process."""

    token: str
    host: str
    machine: str  # boot id and namespace of process ids; empty without /proc
    pid: int
    started: int  # clock ticks from boot to the start of the process; -1: it does not run
    job: str  # Slurm job; empty outside of Slurm
    since: str

    @staticmethod
    def here(job: str) -> Owner:
        """This process, from now on."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        pid = os.getpid()
        return Owner(
            secrets.token_hex(8), socket.gethostname(), _machine(), pid, _started(pid), job, now
        )

    @property
    def is_dead(self) -> bool | None:
        """Whether its process has ended; None on another machine, and where /proc hides the
        processes of other users.
        """
        if not self.machine or self.machine != _machine() or not os.access("/proc/1/stat", os.R_OK):
            return None
        return _started(self.pid) != self.started

    def __str__(self) -> str:
        job = f" (Slurm job {self.job})" if self.job else ""
        text = f"process {self.pid} on {self.host}{job}, since {self.since}"
        return re.sub(r"[^\x20-\x7e]", "?", text)


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> int:
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if state in "ZX" else int(rest[18])  # a zombie has ended


def read_owner(path: Path) -> Owner | None:
    """The owner that a lease names; None when the file is missing, incomplete or not a lease."""
    try:
        with open(path, "rb") as file:
            return Owner(**json.loads(file.read(LARGEST)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


class Lease:
    """A --save folder that this process alone writes to, until `release`."""

    def __init__(self, path: Path, owner: Owner):
        self.path = path
        self.owner = owner
        self.lost = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while not self._end.wait(RENEWED):
            found = read_owner(self.path)
            if found is not None and found.token != self.owner.token:
                self.lost = True
                return
            with suppress(OSError):  # the file system may be unavailable for a while
                os.utime(self.path)

    def check(self) -> None:
        """Raise CheckpointError when another run has taken the folder over."""
        if self.lost:
            raise CheckpointError(
                f"{self.path}: another run has taken this folder over "
                f"({read_owner(self.path)}), since this one had not renewed its lease for "
                f"{STALE:g} s; it ends here, so that the two do not mix. Its checkpoints are whole."
            )

    def release(self) -> None:
        """Give the folder up; the file goes unless another run has taken it over."""
        self._end.set()
        self._thread.join()
        owner = read_owner(self.path)
        if owner is not None and owner.token == self.owner.token:
            with suppress(OSError):
                self.path.unlink()


def take_lease(root: str | Path, job: str) -> Lease:
    """Become the only writer of `root`, which is made if needed; `job` is the Slurm job, if any.

    A dead owner is replaced: at once if its process has ended on this machine or it was an earlier
    start of the same Slurm job, otherwise when it has not renewed its lease for STALE seconds.
    Raises CheckpointError, which names the owner, when that is alive; OSError.
    """
    path = Path(root, NAME)
    make_root(path.parent)
    me = Owner.here(job)
    content = json.dumps(asdict(me), indent=1).encode() + b"\n"
    while True:
        try:
            with new_file(path) as file:
                write_all(file, [memoryview(content)])
            return Lease(path, me)
        except FileExistsError:
            with suppress(FileNotFoundError):  # it was released just now
                _remove_dead(path, me)


def _remove_dead(path: Path, me: Owner) -> None:
    """Remove the lease of a dead owner. Raises CheckpointError when it is alive."""
    before = _stamp(path)
    owner = read_owner(path)
    why = _death(path, owner, me, before)

    # Of two runs that judge the same owner, one removes its lease; the other may catch the new one.
    aside = path.with_name(f".{NAME}.{me.token}")
    os.rename(path, aside)
    if _stamp(aside) != before:
        with suppress(OSError):
            os.link(aside, path)
        owner = read_owner(aside)
        aside.unlink()
        raise _in_use(path, owner)
    aside.unlink()
    shown = owner or f"a run that cannot be read from {NAME}"
    logger.info(f" --save {path.parent}: taken over from {shown}: {why}")


def _death(path: Path, owner: Owner | None, me: Owner, stamp: tuple[int, int]) -> str:
    """Why an owner counts as dead. Raises CheckpointError when it is alive."""
    if owner is not None and owner.is_dead is not None:
        if owner.is_dead:
            return "it has ended"
        raise _in_use(path, owner)
    if owner is not None and owner.job and owner.job == me.job:
        return "it was an earlier start of the same Slurm job"
    age = _file_system_time(path.parent) - stamp[1] / 1e9
    if age > STALE:
        return f"it has renewed its lease {age:.0f} s ago for the last time"

    shown = owner or f"the run that wrote {NAME}"
    logger.info(f" --save {path.parent}: waiting up to {STALE:g} s to see whether {shown} is alive")
    end = time.monotonic() + STALE
    while time.monotonic() < end:
        time.sleep(LOOK)
        if _stamp(path) != stamp:
            raise _in_use(path, read_owner(path) or owner)
    return f"it did not renew its lease for {STALE:g} s"


def _stamp(path: Path) -> tuple[int, int]:
    """Which file it is, and when it was renewed, in ns."""
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns


def _file_system_time(root: Path) -> float:
    probe = root / f".{NAME}.{secrets.token_hex(8)}"
    try:
        with new_file(probe):
            return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _in_use(path: Path, owner: Owner | None) -> CheckpointError:
    return CheckpointError(
        f"--save {path.parent}: another run is writing there: {owner or 'unreadable'}. Two runs "
        "would mix their metrics and checkpoints: give this one another --save folder, or end "
        f"that one first. If it is dead for certain, delete {path}"
    )
