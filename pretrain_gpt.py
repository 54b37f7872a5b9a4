"""Pretrain a GPT model: `python pretrain_gpt.py --help` lists the groups of flags."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path

import megatron

_ours = Path(__file__).resolve().with_name("megatron")
if _ours not in (Path(folder).resolve() for folder in megatron.__path__):
    sys.exit(
        f"`import megatron` finds {', '.join(megatron.__path__)}, another package, and not {_ours} "
        "(megatron-gpt-pretrain): two packages named megatron cannot share an environment; remove "
        "the other one from PYTHONPATH, or use one environment for each"
    )

from megatron.config.arguments import dump_config, parse_arguments
from megatron.config.derive import POSITIONS, derive
from megatron.config.errors import ArgumentErrors, UserError
from megatron.config.help import explained
from megatron.config.streams import escape_unencodable
from megatron.distributed.launchers import rough_launch
from megatron.training.exit import exit_on_signals

PATIENCE = 8.0  # seconds for rank 0 to print the error, and its launcher to end the others


def main(argv: list[str] | None = None) -> int:
    """Flags -> configuration -> run; returns the exit code of the process.

    A mistake of the user's (UserError) is printed without a traceback, and the code is 2. Any other
    exception is raised with its traceback and a note that names the rank.
    """
    escape_unencodable()
    try:
        parsed = parse_arguments(sys.argv[1:] if argv is None else argv)
        if parsed.print_config:
            # Derived position-embedding settings are written out, so that the file keeps its
            # meaning if a default changes.
            print(dump_config(derive(parsed.config, 1, None, POSITIONS).config))
            return 0
        with exit_on_signals(logs=rough_launch().rank == 0):
            # torch is imported only when something runs
            from megatron.training.pretrain import pretrain

            # By its name: the trainer does not depend on tools/, where megatron.tools lies
            # (megatron/__init__.py).
            advisor = importlib.import_module("megatron.tools._advisor").PlanningAdvisor()
            return pretrain(
                parsed.config,
                parsed.notes,
                not_done=parsed.not_done,
                dry_run=parsed.dry_run,
                advisor=advisor,
            )
    except UserError as error:
        print_error(error)
        return 2
    except Exception as error:
        if not hasattr(error, "__notes__"):  # else pretrain has noted rank, layout and iteration
            error.add_note(f"[raised on rank {rough_launch().rank}]")
        raise


def print_error(error: UserError) -> None:
    """Print an error once a job: by rank 0, and by another rank only if the launcher lets it live
    on, which means that rank 0 has not failed.

    torchrun and `srun --kill-on-bad-exit` end the other ranks as soon as the first one has failed.
    """
    launch, text = rough_launch(), explained(error)
    rank = launch.rank
    if rank > 0:
        # raised on several ranks together: the first of them prints it
        if getattr(error, "rank", 0) > 0:
            return
        # the rank that failed has printed it and has the exit code
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        time.sleep(PATIENCE + launch.local_rank / 2)  # and the ranks of a node one after the other
        if isinstance(error, ArgumentErrors):
            text = error.faults[0]
        if not text.startswith("rank "):
            text = f"rank {rank}: {text}"
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
