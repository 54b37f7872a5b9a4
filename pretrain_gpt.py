"""Pretrain a GPT model: `python pretrain_gpt.py --help` lists every flag."""

from __future__ import annotations

import sys
import traceback

from megatron.config.arguments import dump_config, parse_arguments


def main(argv: list[str]) -> int:
    """Flags -> configuration -> run; the exit code: 2 for what the user can mend, which is a message without a traceback."""
    try:
        parsed = parse_arguments(argv)
        if parsed.print_config:
            print(dump_config(parsed.config))
            return 0
        from megatron.training.pretrain import pretrain  # torch is imported only when something runs

        return pretrain(parsed.config, parsed.notes, dry_run=parsed.dry_run)
    except ValueError as error:
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        if not innermost.f_globals["__name__"].startswith("megatron."):
            raise  # not a message of ours: a fault of the program
        if getattr(error, "rank", 0) == 0:  # an error of all ranks is told once
            print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
