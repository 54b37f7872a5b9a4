"""One run at a time writes to a --save folder: `in_use.json` there names the run, which renews the
file while it lives (docs/checkpoint.md).

An owner on this machine holds a lock on the file, which the kernel drops with the process. Many
shared file systems have no locks, and the clocks of machines differ: other owners are judged by
their renewals, on the file system's own clock. Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import re
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from megatron.checkpoint.files import FILE_MODE, make_root, new_file, write_all
from megatron.checkpoint.manifest import CheckpointError, utc_now

logger = logging.getLogger(__name__)

NAME = "in_use.json"
RENEW_S = 5.0  # between two renewals
STALE_S = 60.0  # without a renewal, after which an owner on another machine counts as dead
POLL_S = 0.5  # between two looks at the lease of an owner that may be alive
FIELDS = ("token", "run", "machine", "job")
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def describe_run(job: str) -> dict[str, str]:
    """This process as the content of a lease. `machine`: its boot id, empty without /proc; `job`:
    Slurm's, if any.
    """
    of_job = f" (Slurm job {job})" if job else ""
    machine = ""
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {
        "token": secrets.token_hex(8),
        "run": f"process {os.getpid()} on {socket.gethostname()}{of_job}, since {utc_now()}",
        "machine": machine,
        "job": job,
    }


def read_owner(path: Path) -> dict[str, str]:
    """The run that holds a lease; empty texts when the file is missing, incomplete or no lease."""
    try:
        found = json.loads(path.read_bytes()[:4096])
        return {name: re.sub(r"[^\x20-\x7e]", "?", found[name]) for name in FIELDS}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return dict.fromkeys(FIELDS, "") | {"run": f"a run that cannot be read from {NAME}"}


class Lease:
    """A --save folder that this process alone writes to, until `release`. `lock`: the open file."""

    def __init__(self, path: Path, token: str, lock: int):
        self.path, self.token, self.lock = path, token, lock
        self.confirmed = time.monotonic()  # last renewal; -inf: taken over
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while not self._end.wait(RENEW_S):
            begun = time.monotonic()
            if read_owner(self.path)["token"] not in (self.token, ""):
                self.confirmed = -math.inf
                return
            with suppress(OSError):  # the file system may be unavailable for a while
                os.utime(self.path)
                self.confirmed = begun

    def check(self) -> None:
        """Raise CheckpointError when another run has taken the folder over. Reads the file only if
        this process has stalled for so long that one may have.
        """
        if time.monotonic() - self.confirmed < STALE_S / 2:
            return
        owner = read_owner(self.path)
        if owner["token"] not in (self.token, ""):
            raise CheckpointError(
                f"{self.path}: another run has taken this folder over ({owner['run']}), since this "
                f"one had not renewed its lease for {STALE_S:g} s; it ends here, so that the two "
                "do not mix. Its checkpoints are whole."
            )

    def release(self) -> None:
        """Give the folder up; the file goes unless another run has taken it over."""
        self._end.set()
        self._thread.join()
        if read_owner(self.path)["token"] == self.token:
            with suppress(OSError):
                self.path.unlink()
        os.close(self.lock)


def take_lease(root: str | Path, job: str) -> Lease:
    """Become the only writer of `root`, which is made if needed; `job` is the Slurm job, if any.
    Raises CheckpointError, which names the owner, when one may be alive; OSError.
    """
    path = Path(root, NAME)
    make_root(path.parent)
    me = describe_run(job)
    while True:
        try:
            lock = os.open(path, NEW, FILE_MODE)
            break
        except FileExistsError:
            with suppress(FileNotFoundError):  # it was released just now
                _remove_dead(path, me)
    # Locked before it names a machine: others do not try the lock of a file that they cannot read.
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        me["machine"] = ""  # no locks here: only renewals show that this run lives
    write_all(lock, json.dumps(me, indent=1).encode() + b"\n")
    os.fsync(lock)
    return Lease(path, me["token"], lock)


def _remove_dead(path: Path, me: dict[str, str]) -> None:
    """Remove the lease of a dead owner. Raises CheckpointError when it may be alive."""
    aside = path.with_name(f".{NAME}.{me['token']}")
    owner, judged = read_owner(path), _stamp(path)
    try:
        with new_file(aside) as file:
            age = (os.fstat(file).st_mtime_ns - judged[1]) / 1e9
        why = _death(path, owner, me, age)

        # Of two runs that judge the same owner, one removes its lease. The other may catch the new
        # lease instead, and puts it back.
        os.rename(path, aside)
        if _stamp(aside) != judged:
            with suppress(OSError):
                os.link(aside, path)
            raise _in_use(path, read_owner(aside))
    finally:
        aside.unlink(missing_ok=True)
    logger.info(f" --save {path.parent}: taken over from {owner['run']}: {why}")


def _death(path: Path, owner: dict[str, str], me: dict[str, str], age: float) -> str:
    """Why an owner, which renewed its lease `age` seconds ago, is dead. Raises CheckpointError when
    it is alive; where only its renewals can show that, they are awaited for STALE_S seconds.
    """
    # While its lock is held, a process of this machine is never taken for dead.
    if owner["machine"] and owner["machine"] == me["machine"]:
        locked = _is_locked(path)
        if locked:
            raise _in_use(path, owner)
        if locked is not None:
            return "it has ended"
    # The scheduler has ended a job before it starts it again.
    if owner["job"] and owner["job"] == me["job"]:
        return "it was an earlier start of the same Slurm job"
    if age <= STALE_S:
        wait = f"waiting up to {STALE_S:g} s to see whether {owner['run']} is alive"
        logger.info(f" --save {path.parent}: {wait}")
        judged, end = _stamp(path), time.monotonic() + STALE_S
        while time.monotonic() < end:
            time.sleep(POLL_S)
            if _stamp(path) != judged:
                raise _in_use(path, read_owner(path))
    return f"it has not renewed its lease for {max(age, STALE_S):.0f} s"


def _is_locked(path: Path) -> bool | None:
    """Whether a process holds its lock; None on a file system without locks."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(file)
    return False


def _stamp(path: Path) -> tuple[int, int]:
    """Which file it is, and when it was renewed, in ns."""
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns


def _in_use(path: Path, owner: dict[str, str]) -> CheckpointError:
    return CheckpointError(
        f"--save {path.parent}: another run is writing there: {owner['run']}. Two runs would mix "
        "their metrics and checkpoints: give this one another --save folder, or end that one "
        f"first. If it is dead for certain, delete {path}"
    )
