"""torchrun with the exit code of the rank that failed first (a killed rank: 128 + signal); torchrun itself ends with 1 whatever happened."""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main(argv: list[str]) -> int:
    """Runs torchrun's command line; the exit code."""
    try:
        torchrun(argv)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        print(f"rank {rank} (process {failure.pid}) ended first here, exit code {code}", file=sys.stderr, flush=True)
        return code
    except SignalException as stopped:  # its ranks got the signal too, and 30 seconds
        return 128 + stopped.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
