"""Installing Debian's packages for tests that need a program which lacks here."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

INSTALL_SECONDS = 60


def install(*packages: str) -> str | None:
    """Why the packages could not be installed; None when they are. Of several test processes one
    installs at a time.
    """
    if os.geteuid() != 0:
        return f"only root may install {', '.join(packages)}"
    if shutil.which("apt-get") is None:
        return f"there is no apt-get to install {', '.join(packages)}"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with open(Path(tempfile.gettempdir()) / "megatron-tests-apt.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (
            ["apt-get", "update"],
            ["apt-get", "install", "-y", "--no-install-recommends", *packages],
        ):
            try:
                done = subprocess.run(
                    command,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=INSTALL_SECONDS,
                )
            except subprocess.TimeoutExpired:
                return f"`{' '.join(command)}` took longer than {INSTALL_SECONDS} s"
            if done.returncode != 0:
                return (
                    f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()[-300:]}"
                )
    return None
