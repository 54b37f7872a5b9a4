"""Pretrain a GPT model: `python pretrain_gpt.py --help` lists every flag."""

from __future__ import annotations

import sys

from megatron.config.arguments import dump_config, parse_arguments


def main(argv: list[str]) -> int:
    """Flags -> configuration -> run; the exit code."""
    try:
        parsed = parse_arguments(argv)
        if parsed.print_config:
            print(dump_config(parsed.config))
            return 0
        from megatron.training.pretrain import pretrain  # torch is imported only when something runs

        return pretrain(parsed.config, parsed.notes, dry_run=parsed.dry_run)
    except (ValueError, FileNotFoundError) as error:  # what a user can mend: a message, no traceback
        if type(error).__module__.startswith("megatron."):
            print(error, file=sys.stderr)
            return 2
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
