"""torchrun that ends as the rank that failed first did, with its exit code (a killed rank: 128 +
signal) and what it has said.

torchrun itself ends with 1 whatever happened, and prints some 30 lines of its own traceback beneath
the rank's message.
"""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

USER_ERROR = 2  # pretrain_gpt.py's exit code for a mistake of the user's


def main(argv: list[str]) -> int:
    """Runs torchrun's command line; the exit code."""
    # that ranks failed and were ended is said below
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        torchrun(argv)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        if code != USER_ERROR or rank > 0:  # else rank 0 has printed the message
            print(
                f"rank {rank} (process {failure.pid}) ended first here, exit code {code}",
                file=sys.stderr,
                flush=True,
            )
        return code
    except SignalException as stopped:  # its ranks got the signal too, and time to save (launch.sh)
        return 128 + stopped.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
