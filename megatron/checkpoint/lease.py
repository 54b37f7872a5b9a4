"""One run at a time writes to a --save folder: `in_use.json` there names the run, which renews the
file while it lives (docs/checkpoint.md).

No lock of the file system is used, since many shared ones have none, and no clock of another
machine: age is measured by the file system's own clock. Nothing here imports torch.
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
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import make_root, new_file, write_all
from megatron.checkpoint.manifest import CheckpointError

logger = logging.getLogger(__name__)

NAME = "in_use.json"
RENEWED = 10.0  # seconds between two renewals
STALE = 60.0  # seconds without one after which the owner counts as dead
LOOK = 0.5  # seconds between two looks at a lease of which it is not known whether its owner lives
Stamp = tuple[int, int]  # which file, and when it was renewed, in ns
LARGEST = 4096  # bytes of the file


@dataclass(frozen=True)
class Owner:
    """Who writes to a folder: a process, told apart from all others that there ever were."""

    token: str
    host: str
    machine: str  # since its last start, and the container: where process ids mean the same
    pid: int
    started: int  # clock ticks from the start of the machine to that of the process; -1: not known
    job: str  # Slurm's number; empty outside of Slurm
    since: str

    @staticmethod
    def here(job: str) -> Owner:
        """This process, which starts to write now."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return Owner(
            secrets.token_hex(8),
            socket.gethostname(),
            _machine(),
            os.getpid(),
            _started(os.getpid()),
            job,
            now,
        )

    @property
    def is_dead(self) -> bool | None:
        """Whether its process has ended; None where that cannot be known here."""
        if not self.machine or self.machine != _machine() or not os.access("/proc/1/stat", os.R_OK):
            return None  # elsewhere, or where the processes of others are hidden
        return _started(self.pid) != self.started

    def __str__(self) -> str:
        return (
            f"process {self.pid} on "
            f"{self.host}{f' (Slurm job {self.job})' if self.job else ''}, since {self.since}"
        )


def _machine() -> str:
    """The same for all processes that share process ids; empty where there is no /proc."""
    try:
        return (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} "
            f"{os.readlink('/proc/self/ns/pid')}"
        )
    except OSError:
        return ""


def _started(pid: int) -> int:
    """When a process started, in clock ticks since the machine did; -1 for none and for one that
    has ended and was not waited for.
    """
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if state in "ZX" else int(rest[18])


def read_owner(path: Path) -> Owner | None:
    """The owner that a lease names; None when it names none, as one that is being written."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(LARGEST))
        kinds = {
            field.name: int if field.name in ("pid", "started") else str for field in fields(Owner)
        }
        if (
            isinstance(found, dict)
            and {name: type(value) for name, value in found.items()} == kinds
        ):
            shown: dict[str, Any] = {
                name: value if kinds[name] is int else re.sub(r"[^\x20-\x7e]", "?", value)
                for name, value in found.items()
            }
            return Owner(**shown)
    except (OSError, ValueError, RecursionError):
        pass
    return None


class Lease:
    """A --save folder that this process alone writes to, until `release`. `check` raises when
    another run has taken the folder over.
    """

    def __init__(self, root: Path, owner: Owner):
        self.path = root / NAME
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
            with suppress(OSError):  # a file system that is away for a while
                os.utime(self.path)

    def check(self) -> None:
        if self.lost:
            raise CheckpointError(
                f"{self.path}: another run has taken this folder over "
                f"({read_owner(self.path)}), since this one had not renewed its "
                f"lease for {STALE:g} s; it ends here, so that the two do not mix. Its "
                "checkpoints are whole."
            )

    def release(self) -> None:
        """The folder is free again."""
        self._end.set()
        self._thread.join(RENEWED)
        found = read_owner(self.path)
        if found is not None and found.token == self.owner.token:
            with suppress(OSError):
                self.path.unlink()


def take_lease(root: str | Path, job: str) -> Lease:
    """Make this process the one that writes to `root`. `job`: Slurm's number of its job, or empty.

    A lease of a dead owner is taken over: of a process that has ended on this machine, or of an
    earlier start of the same Slurm job, at once; any other when it has not been renewed for STALE
    seconds. Raises CheckpointError, which names the owner, when that one lives; OSError.
    """
    root = Path(root)
    me = Owner.here(job)
    make_root(root)
    path = root / NAME
    try:
        _write(path, me)
        return Lease(root, me)
    except FileExistsError:
        pass
    before = _stamp(path)
    owner = read_owner(path)
    why = _dead(owner, me, root, before)
    if why is None:
        logger.info(
            f" --save {root}: waiting up to {STALE:g} s to see whether "
            f"{owner or 'the run that wrote ' + NAME} lives"
        )
        why = _watch(path, before, owner)
    if not _replace(path, before, me):
        raise _in_use(root, read_owner(path))
    if owner is None or not _same_process(owner, me):
        logger.info(
            f" --save {root}: taken over from "
            f"{owner or 'a run that cannot be read from ' + NAME}: {why}"
        )
    return Lease(root, me)


def _dead(owner: Owner | None, me: Owner, root: Path, stamp: Stamp) -> str | None:
    """Why an owner is known to be dead; None when it is not known. Raises CheckpointError when it
    is known to live.
    """
    if owner is not None and owner.is_dead:
        return "it has ended"
    if owner is not None and _same_process(owner, me):
        return "it was this process"
    if owner is not None and owner.is_dead is False:
        raise _in_use(root, owner)
    if owner is not None and owner.job and owner.job == me.job:
        return "it was an earlier start of the same Slurm job"
    age = _now(root) - stamp[1] / 1e9
    return f"it has renewed its lease {age:.0f} s ago for the last time" if age > STALE else None


def _same_process(one: Owner, other: Owner) -> bool:
    return (one.machine, one.pid, one.started) == (other.machine, other.pid, other.started)


def _watch(path: Path, before: Stamp, owner: Owner | None) -> str:
    """Why an owner whose lease does not change for STALE seconds is dead. Raises CheckpointError as
    soon as it changes.
    """
    end = time.monotonic() + STALE
    while time.monotonic() < end:
        time.sleep(LOOK)
        try:
            changed = _stamp(path) != before
        except FileNotFoundError:
            return "it has ended meanwhile"
        if changed:
            raise _in_use(path.parent, read_owner(path) or owner)
    return f"it did not renew its lease for {STALE:g} s"


def _replace(path: Path, before: Stamp, me: Owner) -> bool:
    """Put our lease into the place of the one that was judged; False when another run was
    faster.
    """
    aside = path.with_name(f".{NAME}.{me.token}")
    try:
        os.rename(path, aside)
        if _stamp(aside) != before:  # not the one that was judged
            with suppress(OSError):
                os.link(aside, path)
            return False
    except FileNotFoundError:
        pass
    finally:
        aside.unlink(missing_ok=True)
    try:
        _write(path, me)
    except FileExistsError:
        return False
    return True


def _write(path: Path, owner: Owner) -> None:
    with new_file(path) as file:
        write_all(file, [memoryview(json.dumps(asdict(owner), indent=1).encode() + b"\n")])


def _stamp(path: Path) -> Stamp:
    """Which file it is, and when it was renewed, in ns."""
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns


def _now(root: Path) -> float:
    """The file system's own time, in s."""
    probe = root / f".{NAME}.{secrets.token_hex(8)}"
    try:
        with new_file(probe):
            pass
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _in_use(root: Path, owner: Owner | None) -> CheckpointError:
    return CheckpointError(
        f"--save {root}: another run is writing there: {owner or 'unreadable'}. Two runs "
        "would mix their metrics and checkpoints: give this one another "
        f"--save folder, or end that one first. If it is dead for certain, delete {root / NAME}"
    )
