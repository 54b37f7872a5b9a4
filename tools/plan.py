"""Plan a run without a GPU: python tools/plan.py memory <flags of pretrain_gpt.py> --world-size N

    --memory GIB          what a device has (80)
    --mfu SHARE           what training reaches of its peak (0.4); the peak is --peak-tflops (989: H100)
    --bandwidth GB/S      what one rank sends at (50: one 400 Gb/s adapter)

Prints a table of memory by pipeline rank, which stage of ZeRO fits, and whether communication hides behind computation. No data file is read;
the tokenizer is, unless --vocab-size says how many entries it has. Exit code 2: flags that pretrain_gpt.py would refuse.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.arguments import parse_arguments
from megatron.config.errors import ArgumentErrors
from megatron.config.groups import Config
from megatron.config.validate import resolve
from megatron.data.tokenizer import build_tokenizer
from megatron.plan.advice import BANDWIDTH, MFU, PEAK_TFLOPS, Machine
from megatron.plan.table import memory_report

OWN = {"--memory": 80.0, "--mfu": MFU, "--bandwidth": BANDWIDTH}


def take_own(argv: list[str]) -> tuple[dict[str, float], list[str]]:
    """(values of the flags that are this tool's, the other words). Raises ArgumentErrors."""
    values, rest, faults = dict(OWN), [], []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag not in OWN:
            rest.append(word)
            continue
        text = value if equals else next(words, "")
        try:
            values[flag] = float(text)
            if not 0 < values[flag] < float("inf"):
                raise ValueError
        except ValueError:
            faults.append(f"{flag} {text}: expected a number above 0")
    if faults:
        raise ArgumentErrors(faults)
    return values, rest


def vocabulary(config: Config) -> int:
    """Entries of the tokenizer, which is read only where --vocab-size does not say."""
    data = config.data
    if data.vocab_size is not None:
        return data.vocab_size + (data.tokenizer_type == "NullTokenizer")
    return build_tokenizer(data).vocab_size


def plan_memory(argv: list[str]) -> list[str]:
    """The lines that `memory` prints. Raises ValueError for what the user can mend."""
    own, rest = take_own(argv)
    parsed = parse_arguments([*rest, "--dry-run"])
    world_size = parsed.config.distributed.world_size
    if world_size is None:
        raise ArgumentErrors(["--world-size is missing: how many ranks the run is planned for"])
    vocab_size = vocabulary(resolve(parsed.config, world_size, None).config)
    config = resolve(parsed.config, world_size, vocab_size).config
    machine = Machine(config.logging.peak_tflops or PEAK_TFLOPS, own["--mfu"], own["--bandwidth"])
    return memory_report(config, vocab_size, world_size, memory=own["--memory"], machine=machine)


def main(argv: list[str]) -> int:
    """The exit code."""
    if not argv or argv[0] != "memory" or any(word in ("-h", "--help") for word in argv):
        print(__doc__.strip(), file=sys.stdout if "--help" in argv or "-h" in argv else sys.stderr)
        return 0 if "--help" in argv or "-h" in argv else 2
    try:
        print("\n".join(plan_memory(argv[1:])))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
