"""Pretrain a GPT model: `python pretrain_gpt.py --help` lists every flag."""

from __future__ import annotations

import sys
import traceback

from megatron.config.arguments import dump_config, parse_arguments
from megatron.config.errors import ArgumentErrors


def main(argv: list[str] | None = None) -> int:
    """Flags -> configuration -> run; the exit code: 2 for what the user can mend, which is a message without a traceback."""
    try:
        parsed = parse_arguments(sys.argv[1:] if argv is None else argv)
        if parsed.print_config:
            print(dump_config(parsed.config))
            return 0
        from megatron.training.pretrain import pretrain  # torch is imported only when something runs

        return pretrain(parsed.config, parsed.notes, dry_run=parsed.dry_run)
    except ValueError as error:
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        if not innermost.f_globals["__name__"].startswith("megatron."):
            raise  # not a message of ours: a fault of the program
        told = message(error)
        if told:
            print(told, file=sys.stderr)
        return 2


def message(error: ValueError) -> str:
    """What this rank says of an error: rank 0 tells all of what every rank knows, the others at most the first fault of their flags."""
    if isinstance(error, ArgumentErrors):
        from megatron.dist.setup import LaunchError, read_launch

        try:
            rank = read_launch().rank
        except LaunchError:
            rank = 0
        return str(error) if rank == 0 else f"rank {rank}: {error.faults[0]}"
    return str(error) if getattr(error, "rank", 0) == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
