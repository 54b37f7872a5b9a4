"""Plan a run without a GPU: python tools/plan.py memory|checkpoint <flags of pretrain_gpt.py>
--world-size N

memory: a table of memory by pipeline rank, which stage of ZeRO fits, and whether communication
hides behind computation.
    --device-memory GIB   what a device has (80); the first line says whether the run fits
    --mfu SHARE           what training reaches of its peak (0.4); the peak is --peak-tflops (989:
    H100)
    --bandwidth GB/S      what one rank sends at (50: one 400 Gb/s adapter)
    --host-bandwidth GB/S what weights come from host memory at, and activations go there (50: PCI
    Express 5.0, assumed)
checkpoint: bytes and seconds of a checkpoint, and how often to save.
    --write GB/S          what one rank writes to --save at, all writing at once (1)
    --copy GB/S           what one rank copies into host memory at (10)
    --mtbf HOURS          mean time between failures of the job (24)

No data file is read; the tokenizer is, unless --vocab-size says how many entries it has. Exit code
2: flags that pretrain_gpt.py would refuse.
"""

from __future__ import annotations

import dataclasses
import sys

if not __package__:  # run as a file of a checkout
    import _checkout  # noqa: F401

from megatron.config.arguments import parse_arguments
from megatron.config.errors import ArgumentErrors, UserError
from megatron.config.groups import Config
from megatron.config.validate import resolve
from megatron.data.tokenizer import build_tokenizer
from megatron.plan.advice import BANDWIDTH, HOST_BANDWIDTH, MFU, PEAK_TFLOPS, Machine
from megatron.plan.checkpoint import checkpoint_report
from megatron.plan.memory import MemoryPlan  # noqa: E402
from megatron.plan.recompute import choose_layers  # noqa: E402
from megatron.plan.table import memory_report  # noqa: E402
from megatron.plan.verdict import DEVICE_MEMORY, NODE_RANKS, check_host_memory

OWN = {
    "memory": {"--mfu": MFU, "--bandwidth": BANDWIDTH, "--host-bandwidth": HOST_BANDWIDTH},
    "checkpoint": {"--write": 1.0, "--copy": 10.0, "--mtbf": 24.0},
}


def take_own(argv: list[str], own: dict[str, float]) -> tuple[dict[str, float], list[str]]:
    """(values of the flags that are this tool's, the other words). Raises ArgumentErrors."""
    values, rest, faults = dict(own), [], []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag not in own:
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


def without_files(config: Config) -> Config:
    """The same run on computed tokens; where --vocab-size says how many entries the tokenizer has,
    without its files, too.
    """
    data = config.data
    if data.vocab_size is not None:
        # NullTokenizer adds one
        entries = data.vocab_size - (data.tokenizer_type not in (None, "NullTokenizer"))
        data = dataclasses.replace(
            data,
            tokenizer_type="NullTokenizer",
            vocab_size=entries,
            tokenizer_model=None,
            vocab_file=None,
            merge_file=None,
        )
    data = dataclasses.replace(
        data,
        mock_data=True,
        data_path=None,
        split=None,
        train_data_path=None,
        valid_data_path=None,
        test_data_path=None,
    )
    return dataclasses.replace(config, data=data)


def plan(what: str, argv: list[str]) -> list[str]:
    """The lines that `memory` or `checkpoint` prints. Raises UserError for what the user can
    mend.
    """
    own, rest = take_own(argv, OWN[what])
    parsed = parse_arguments([*rest, "--dry-run"])
    world_size = parsed.config.distributed.world_size
    if world_size is None:
        raise ArgumentErrors(["--world-size is missing: how many ranks the run is planned for"])
    config = without_files(parsed.config)
    vocab_size = build_tokenizer(resolve(config, world_size, None).config.data).vocab_size
    config = resolve(config, world_size, vocab_size).config
    config, reasons = choose_layers(config, vocab_size, world_size, "cuda")
    if what == "checkpoint":
        return checkpoint_report(
            config,
            vocab_size,
            world_size,
            write=own["--write"],
            copy=own["--copy"],
            between_failures=own["--mtbf"],
        )
    machine = Machine(
        config.logging.peak_tflops or PEAK_TFLOPS,
        own["--mfu"],
        own["--bandwidth"],
        own["--host-bandwidth"],
    )
    memory = MemoryPlan(config, vocab_size, world_size)
    check_host_memory(memory, config.distributed.host_memory, min(world_size, NODE_RANKS))
    report = memory_report(
        memory,
        memory=config.distributed.device_memory or DEVICE_MEMORY,
        machine=machine,
    )
    return [*report, *reasons]


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in OWN or any(word in ("-h", "--help") for word in argv):
        print(__doc__.strip(), file=sys.stdout if "--help" in argv or "-h" in argv else sys.stderr)
        return 0 if "--help" in argv or "-h" in argv else 2
    try:
        print("\n".join(plan(argv[0], argv[1:])))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
