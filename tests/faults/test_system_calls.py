"""The order of fsync and rename in a background save, in trainer and writer, as the kernel sees
it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")

ONE_SAVE = """
import sys
sys.path[:0] = [{folder!r}, {tests!r}]
from saving_jobs import ONE, CheckpointManager, contents, staging_bytes
from test_background_faults import writers_begin_with
with writers_begin_with({prologue!r}):
    saver = CheckpointManager(sys.argv[1], ONE, staging_bytes(contents(1)[0], None))
    saver.save(1, *contents(1))
    assert saver.finalize()
    saver.close()
"""


def faults_of_order(root: Path, prologue: str = "") -> list[str]:
    """What is not durable when it must be; `prologue` is executed in the writer before it
    begins.
    """
    log, program = (
        root.with_suffix(".strace"),
        ONE_SAVE.format(
            folder=str(Path(__file__).parent),
            tests=str(Path(__file__).parents[1]),
            prologue=prologue,
        ),
    )
    command = [
        "strace",
        "-f",
        "-y",
        "-qq",
        "-o",
        str(log),
        "-e",
        "trace=openat,pwritev,fsync,rename",
        sys.executable,
        "-c",
        program,
        str(root),
    ]
    subprocess.run(
        command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    unsynced: set[str] = set()  # files and folders
    faults, renamed = [], 0
    for line in log.read_text().splitlines():
        call = line.split(maxsplit=1)[1]
        if str(root) not in call or "= -1" in call:
            continue
        paths = [
            path for path in re.findall(r'[<"]([^<>"]+)[>"]', call) if path.startswith(str(root))
        ]
        if call.startswith("openat") and "O_CREAT" in call:
            unsynced |= {paths[0], str(Path(paths[0]).parent)}
        elif call.startswith("pwritev"):
            unsynced.add(paths[0])
        elif call.startswith("fsync"):
            unsynced.discard(paths[0])
        elif call.startswith("rename"):
            renamed += 1
            faults += [
                f"{path} is not durable when {paths[0]} is renamed"
                for path in unsynced
                if path.startswith(paths[0])
            ]
            unsynced.add(str(root))
    assert renamed == 2, "the checkpoint, and the tracker"
    return faults + [f"{path} is not durable in the end" for path in unsynced]


def test_all_is_durable_when_it_gets_its_name(tmp_path):
    assert faults_of_order(tmp_path / "run") == []


def test_a_writer_that_does_not_sync_is_seen(tmp_path):
    found = faults_of_order(tmp_path / "run", "import os; os.fsync = lambda file: None")
    assert any("shard-00000.safetensors is not durable when" in fault for fault in found)
