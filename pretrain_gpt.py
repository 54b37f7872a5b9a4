"""Pretrain a GPT model: `python pretrain_gpt.py --help` lists every flag."""

from __future__ import annotations

import sys

from megatron.config.arguments import dump_config, parse_arguments
from megatron.config.errors import ArgumentErrors, UserError


def main(argv: list[str] | None = None) -> int:
    """Flags -> configuration -> run; returns the exit code of the process.

    A mistake of the user's (UserError) is printed without a traceback, and the code is 2. Any other
    exception is raised with its traceback and a note that names the rank.
    """
    try:
        parsed = parse_arguments(sys.argv[1:] if argv is None else argv)
        if parsed.print_config:
            print(dump_config(parsed.config))
            return 0
        from megatron.training.pretrain import pretrain  # torch is imported only when something runs

        return pretrain(parsed.config, parsed.notes, not_done=parsed.not_done, dry_run=parsed.dry_run)
    except UserError as error:
        text = message(error)
        if text:
            print(text, file=sys.stderr)
        return 2
    except Exception as error:
        error.add_note(f"[raised on rank {launched_rank()}]")
        raise


def message(error: UserError) -> str:
    """What this rank prints of an error.

    Rank 0 prints all of what every rank knows, the others at most the first fault of their flags.
    """
    if isinstance(error, ArgumentErrors):
        rank = launched_rank()
        return str(error) if rank == 0 else f"rank {rank}: {error.faults[0]}"
    return str(error) if getattr(error, "rank", 0) == 0 else ""


def launched_rank() -> int:
    """This process's rank; 0 where the launcher's variables cannot be read."""
    from megatron.dist.setup import LaunchError, read_launch

    try:
        return read_launch().rank
    except LaunchError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
