"""The command line, read so that every fault is reported at once.

Python's argparse is not used: it stops at the first fault, and an unset shell variable (`--lr $LR`)
makes it blame the next flag. Here a flag owns every word up to the next flag; what follows is
checked per flag. Flags of Megatron-LM and Megatron-DeepSpeed that are not fields are answered by
the table in `compatibility.py`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

from megatron.config import compatibility
from megatron.config.deepspeed import compare_with_deepspeed
from megatron.config.errors import ArgumentErrors
from megatron.config.groups import Config, GivenConfig
from megatron.config.help import help_text
from megatron.config.megatron_deepspeed import read_together
from megatron.config.reading import Reading, read_config, split_words
from megatron.config.validate import cross_field_faults


@dataclass(frozen=True)
class Parsed:
    """Settings of a command line, notes, and what to do instead of training."""

    config: GivenConfig
    notes: list[str]
    not_done: list[str]  # services that were asked for and do not exist here
    dry_run: bool
    print_config: bool


def dump_config(config: Config) -> str:
    return json.dumps(config.to_dict(), indent=2)


def _rule_faults(config: Config, unsure: set[str]) -> list[str]:
    """Faults of the rules between fields, except those about the flags `unsure`."""
    layout = config.distributed
    smallest = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size
    world = layout.world_size or max(1, smallest)  # the launcher's ranks are not known here
    return [
        fault
        for fault in cross_field_faults(config, world, None)
        if not any(re.search(rf"{flag}(?![\w-])", fault) for flag in unsure)
    ]


def parse_arguments(argv: list[str]) -> Parsed:
    """Settings of a command line; `--help` prints and exits. Raises one `ArgumentErrors` with every
    fault; where there is one, those of rules between fields are added, so that nothing waits behind
    the first mistake (but those about a flag whose value could not be read).
    """
    if text := help_text(argv):
        print(text)
        raise SystemExit(0)
    # 1. The line by itself, or on top of the file that it names.
    occurrences, faults = split_words(argv)
    reading = Reading()
    for flag, words in occurrences:
        reading.read(flag, words)
    if "--config" in reading.commands:
        reading = read_config(reading.commands["--config"])
        for flag, words in occurrences:
            reading.read(flag, words)
    reading.faults[:0] = faults

    # 2. What needs all other settings: flags that act together, a DeepSpeed file, and the answers
    # to flags of other programs.
    read_together(reading)
    if "--deepspeed-config" in reading.commands:
        compare_with_deepspeed(reading.commands["--deepspeed-config"], reading)
    not_done = compatibility.answer(reading)
    size, dry_run = reading.config.distributed.world_size, "--dry-run" in reading.commands
    if size is not None and not dry_run:
        reading.faults.append(
            f"--world-size {size}: only with --dry-run; a launcher sets the size of a real run"
        )
    if reading.faults:
        raise ArgumentErrors([*reading.faults, *_rule_faults(reading.config, reading.unsure)])
    print_config = "--print-config" in reading.commands
    flags = replace(reading.config, given=frozenset(reading.set_by))
    return Parsed(GivenConfig(flags), reading.notes, not_done, dry_run, print_config)
