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

SAVES = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from saving_jobs import ONE, CheckpointManager, contents, staging_bytes
from test_background_faults import writers_begin_with
for name, prologue in {prologues!r}.items():
    with writers_begin_with(prologue):
        memory = staging_bytes(contents(1)[0], None)
        saver = CheckpointManager(Path(sys.argv[1], name), ONE, memory)
        saver.save(1, *contents(1))
        assert saver.finalize()
        saver.close()
"""
NO_SYNC = "import os; os.fsync = lambda file: None"  # a mutant's
CALLS = "trace=openat,pwritev,fsync,rename"


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> tuple[Path, list[str]]:
    """The folder that holds `right` and `mutant`, and the calls that made them."""
    folder = tmp_path_factory.mktemp("saves")
    log, tests = folder / "strace", Path(__file__).parents[1]
    program = SAVES.format(
        paths=[str(tests / "faults"), str(tests)], prologues={"right": "", "mutant": NO_SYNC}
    )
    tracer = ["strace", "-f", "--seccomp-bpf", "-y", "-qq", "-o", str(log), "-e", CALLS]
    subprocess.run(
        [*tracer, sys.executable, "-c", program, str(folder)],
        check=True,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return folder, log.read_text().splitlines()


def faults_of_order(root: Path, lines: list[str]) -> list[str]:
    """What is not durable when it must be."""
    unsynced: set[str] = set()  # files and folders
    faults, renamed = [], 0
    for line in lines:
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


def test_all_is_durable_when_it_gets_its_name(calls):
    folder, lines = calls
    assert faults_of_order(folder / "right", lines) == []


def test_a_writer_that_does_not_sync_is_seen(calls):
    folder, lines = calls
    found = faults_of_order(folder / "mutant", lines)
    assert any("shard-00000.safetensors is not durable when" in fault for fault in found)
