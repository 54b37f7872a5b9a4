"""Every kernel goes through Triton's own launcher for Hopper and Ampere, into a driver that checks
what it is given and computes nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pretended.process import MARKS, found_by

pytestmark = MARKS


def launch(folder: Path, *words: str) -> tuple[dict, list[str]]:
    """What launches.py found, and the lines of the driver's log."""
    log = folder / "driver.log"
    log.write_text("")
    found = found_by("launches.py", folder, "--log", str(log), *words)
    return found, log.read_text().splitlines()


def faults(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("FAULT")]


@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.full
def test_every_kernel_is_launched(tmp_path, arch):
    """Once at least; the list of compiled kernels has their names."""
    found, lines = launch(tmp_path, "--arch", str(arch))
    assert found["failed"] == {}
    assert faults(lines) == []
    assert found["launched"] == found["compiled"]
    launches = sum(line.startswith("LAUNCH") for line in lines)
    assert launches >= len(found["launched"])
    # the TMA unit is Hopper's
    assert ("MAP" in lines) == (arch == 90)


def test_a_misaligned_descriptor_is_found(tmp_path):
    """Operands two bytes off a multiple of 16, and nothing that copies them."""
    found, lines = launch(tmp_path, "--fault", "misaligned", "attention")
    assert found["failed"]
    assert all("refused by the pretended driver" in text for text in found["failed"].values())
    assert set(faults(lines)) == {"FAULT map: address"}
