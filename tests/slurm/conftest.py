"""The cluster of these tests: four virtual nodes, started for the session and stopped at its
end.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Cluster, missing_slurm

WITHOUT_SLURM: list[str] = []  # the reason, printed in a separate section at the end of the output


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A running Slurm. Where none can be installed, the tests that need it are skipped, with the
    reason.
    """
    reason = missing_slurm()
    if reason is not None:
        WITHOUT_SLURM.append(reason)
        pytest.skip(f"no Slurm here: {reason}")
    running = Cluster(tmp_path_factory.mktemp("slurm") / "cluster", nodes=4)
    try:
        running.start()
        yield running
    finally:
        running.stop()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if WITHOUT_SLURM:
        terminalreporter.section("SKIPPED: launchers on a real Slurm", sep="!")
        terminalreporter.line(WITHOUT_SLURM[0])
