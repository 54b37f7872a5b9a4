"""Plan a run without a GPU.

    python tools/plan.py COMMAND <flags of pretrain_gpt.py> --world-size N

memory: a table of memory by pipeline rank, which stage of ZeRO fits, and whether communication
hides behind computation.
    --device-memory GIB   what a device has (80); the first line is whether the run fits
    --mfu SHARE           what training reaches of its peak (0.4); the peak is --peak-tflops
                          (989: H100)
    --bandwidth GB/S      what one rank sends at (50: one 400 Gb/s adapter)
    --host-bandwidth GB/S what weights come from host memory at, and activations go there (50: PCI
                          Express 5.0, assumed)
checkpoint: bytes and seconds of a checkpoint, and how often to save.
    --write GB/S          what one rank writes to --save at, all writing at once (1)
    --copy GB/S           what one rank copies into host memory at (10)
    --mtbf HOURS          mean time between failures of the job (24)
step: how long a step takes, where it goes, days and GPU hours of the run, and memory.
search: the fastest layouts that fit, as flags to paste, and why the next ones lose. Flags of the
layout (parallel sizes, ZeRO, micro-batch, recomputation, activation offload) it chooses itself.
explain: what a change of one flag would bring.
    --hardware NAME|FILE  the device: a100-40, a100-80, b200, h100, h200, or a file that
                          measure or fit wrote (h100)
    --gpus-per-node N     (8)
    --gpu-hour-price D    dollars of a GPU hour, for the cost of the run
    --json                step alone: one JSON object
validate FILE.csv ... [--out FILE.json]: published rows next to predictions, row by row and by
group.
    --kept-out            also apart: rows that the shipped constants were fitted to, and those kept
                          out of that fit, which a digest of model and layout chooses
    --unseen FILE.csv     more rows, none of which was fitted to
    --hardware NAME|FILE  constants in the place of the shipped ones of this type of GPU
fit FILE ... --hardware NAME|FILE --out FILE.json: a device's constants from steps that were
measured: rows of such a CSV file, or metrics.jsonl of runs.
    --published           as the shipped constants are made: from what was known before any fit,
                          and without the rows that are kept out
measure --out FILE.json: the constants of this machine, measured in a minute.

No data file is read; the tokenizer is, unless --vocab-size gives its number of entries. Exit code
2: flags that pretrain_gpt.py would refuse.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
from pathlib import Path

if not __package__:  # run as a file of a checkout
    import _checkout  # noqa: F401

from megatron.tools._plan.advice import BANDWIDTH, HOST_BANDWIDTH, MFU, PEAK_TFLOPS, Machine
from megatron.tools._plan.checkpoint import checkpoint_report
from megatron.tools._plan.fit import fit_files
from megatron.tools._plan.hardware import Hardware, hardware_sources, load_hardware, write_hardware
from megatron.tools._plan.measure import measure_machine
from megatron.tools._plan.memory import MemoryPlan
from megatron.tools._plan.recompute import choose_layers
from megatron.tools._plan.rows import is_kept_out, read_rows
from megatron.tools._plan.search import Search, changed, explain, without_chosen
from megatron.tools._plan.step_table import estimate, explain_report, search_report, step_report
from megatron.tools._plan.table import memory_report
from megatron.tools._plan.validate import (
    FITTED,
    KEPT,
    UNSEEN,
    predict_row,
    runs_on,
    validation_record,
    validation_report,
)
from megatron.tools._plan.verdict import DEVICE_MEMORY, NODE_RANKS, check_host_memory

from megatron.config.arguments import parse_arguments
from megatron.config.derive import derive
from megatron.config.errors import ArgumentErrors, UserError
from megatron.config.groups import Config
from megatron.config.help import explained
from megatron.config.streams import escape_unencodable  # noqa: E402
from megatron.config.validate import resolve
from megatron.data.tokenizer import build_tokenizer

# The tool's own flags: numbers by their default (None: not given), and words.
OF_A_DEVICE = ("step", "search", "explain")
OF_NODES: dict[str, float | None] = {"--gpus-per-node": None, "--gpu-hour-price": None}
NUMBERS: dict[str, dict[str, float | None]] = {
    "memory": {"--mfu": MFU, "--bandwidth": BANDWIDTH, "--host-bandwidth": HOST_BANDWIDTH},
    "checkpoint": {"--write": 1.0, "--copy": 10.0, "--mtbf": 24.0},
    **dict.fromkeys(OF_A_DEVICE, OF_NODES),
}
WORDS = {
    **dict.fromkeys(OF_A_DEVICE, {"--hardware"}),
    "validate": {"--hardware", "--out", "--unseen"},
    "fit": {"--hardware", "--out"},
    "measure": {"--out"},
}
SWITCHES = {"step": "--json", "validate": "--kept-out", "fit": "--published"}


@dataclasses.dataclass
class Own:
    """Values of the tool's own flags, and the other words."""

    numbers: dict[str, float | None]
    words: dict[str, str]
    switches: set[str]
    rest: list[str]


def take_own(what: str, argv: list[str]) -> Own:
    """Parse a command's own flags. Raises ArgumentErrors."""
    own = Own(dict(NUMBERS.get(what, {})), {}, set(), [])
    named = WORDS.get(what, set())
    faults = []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if word == SWITCHES.get(what):
            own.switches.add(word)
        elif flag in named:
            own.words[flag] = value if equals else next(words, "")
            if not own.words[flag]:
                faults.append(f"{flag}: a value is missing")
        elif flag in own.numbers:
            text = value if equals else next(words, "")
            try:
                own.numbers[flag] = number = float(text)
                if not 0 < number < float("inf"):
                    raise ValueError
            except ValueError:
                faults.append(f"{flag} {text}: expected a number above 0")
        else:
            own.rest.append(word)
    if faults:
        raise ArgumentErrors(faults)
    return own


def without_files(config: Config) -> Config:
    """The same run on computed tokens; where --vocab-size gives the tokenizer's number of entries,
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


def asked(argv: list[str], *, is_layout_given: bool = True) -> tuple[Config, int, int]:
    """(configuration as parsed, entries of the vocabulary, ranks). A layout that is yet to be found
    is not checked. Raises UserError.
    """
    parsed = parse_arguments([*argv, "--dry-run"])
    world_size = parsed.config.distributed.world_size
    if world_size is None:
        raise ArgumentErrors(["--world-size is missing: how many ranks the run is planned for"])
    config = without_files(parsed.config)
    if is_layout_given:
        derived = resolve(config, world_size, None).config
    else:
        derived = derive(config, world_size, None).config
    return config, build_tokenizer(derived.data).vocab_size, world_size


def plan(what: str, own: Own) -> list[str]:
    """The lines that `memory` or `checkpoint` prints. Raises UserError for what the user can
    fix.
    """
    config, vocab_size, world_size = asked(own.rest)
    config = resolve(config, world_size, vocab_size).config
    config, reasons = choose_layers(config, vocab_size, world_size, "cuda")
    if what == "checkpoint":
        return checkpoint_report(
            config,
            vocab_size,
            world_size,
            write=own.numbers["--write"],
            copy=own.numbers["--copy"],
            between_failures=own.numbers["--mtbf"],
        )
    machine = Machine(
        config.logging.peak_tflops or PEAK_TFLOPS,
        own.numbers["--mfu"],
        own.numbers["--bandwidth"],
        own.numbers["--host-bandwidth"],
    )
    memory = MemoryPlan(config, vocab_size, world_size)
    check_host_memory(memory, config.distributed.host_memory, min(world_size, NODE_RANKS))
    report = memory_report(
        memory,
        memory=config.distributed.device_memory or DEVICE_MEMORY,
        machine=machine,
    )
    return [*report, *reasons]


def hardware_of(own: Own) -> Hardware:
    """The device that --hardware names, in nodes of --gpus-per-node."""
    hardware = load_hardware(own.words.get("--hardware", "h100"))
    nodes = own.numbers.get("--gpus-per-node")
    if nodes is None:
        return hardware
    if nodes % 1:
        raise ArgumentErrors([f"--gpus-per-node {nodes:g}: must be a whole number"])
    return dataclasses.replace(hardware, node_size=int(nodes))


def time_lines(what: str, own: Own) -> list[str]:
    """What `step`, `search` and `explain` print."""
    hardware = hardware_of(own)
    config, vocab_size, world_size = asked(own.rest, is_layout_given=what != "search")
    price = own.numbers["--gpu-hour-price"]
    if config.distributed.device_memory is not None:
        hardware = dataclasses.replace(hardware, memory_gib=config.distributed.device_memory)
    if what == "search":
        config, replaced = without_chosen(config)
        found = Search(config, vocab_size, world_size, hardware).run()
        note = [f"chosen by the search, not as given: {', '.join(replaced)}"] if replaced else []
        return [*note, *search_report(found, hardware, price)]
    resolved = resolve(config, world_size, vocab_size).config
    resolved, reasons = choose_layers(resolved, vocab_size, world_size, hardware.device)
    memory = MemoryPlan(resolved, vocab_size, world_size, hardware.device)
    found = estimate(memory, hardware)
    if what == "explain":
        # each change is of the run with what --recompute auto has chosen
        layers = resolved.training.recompute_layers
        chosen = {"recompute": None, "memory_budget": None, "recompute_layers": layers}
        search = Search(changed(config, chosen), vocab_size, world_size, hardware)
        tried = explain(search, changed(resolved, chosen))
        return [*step_report(memory, found, price), *explain_report(found, tried)]
    if own.switches:
        return [json.dumps(found.written())]
    return [*step_report(memory, found, price), *reasons]


def validate(own: Own) -> list[str]:
    """Rows of files next to their predictions; --out takes them as JSON."""
    if not own.rest and "--unseen" not in own.words:
        raise UserError("validate: a file of rows is missing: tools/plan.py validate rows.csv")
    name = own.words.get("--hardware")
    given = None if name is None else load_hardware(name)
    rows = [row for path in own.rest for row in read_rows(path)]
    predictions = [predict_row(row, given) for row in rows]
    if own.switches:
        for each in predictions:
            each.part = KEPT if is_kept_out(each.row) else FITTED
    if "--unseen" in own.words:
        more = [predict_row(row, given) for row in read_rows(own.words["--unseen"])]
        predictions += [dataclasses.replace(each, part=UNSEEN) for each in more]
    if given and not any(not each.refused and runs_on(each.row, given) for each in predictions):
        raise UserError(f"--hardware {name}: no row that can be predicted ran on {given.name}")
    if "--out" in own.words:
        found = validation_record(predictions)
        Path(own.words["--out"]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return validation_report(predictions)


def fit_device(own: Own) -> list[str]:
    """A device's constants from measured steps go to --out."""
    published = bool(own.switches)
    prior = load_hardware(own.words.get("--hardware", "h100"), is_fitted=not published)
    hardware, sources = fit_files(own.rest, prior, published=published)
    texts = hardware_sources(own.words.get("--hardware", "h100"))
    sources = texts | {name: f"{text}: {texts[name]}" for name, text in sources.items()}
    return written_out(own, hardware, sources, prior if published else None)


def written_out(
    own: Own, hardware: Hardware, sources: dict[str, str], prior: Hardware | None = None
) -> list[str]:
    """A device goes to --out; a line for each constant."""
    out = own.words["--out"]
    write_hardware(Path(out), hardware, sources, prior)
    return [
        *(f"{name} {getattr(hardware, name):.6g}: {text}" for name, text in sources.items()),
        f"written to {out}: give it as --hardware {out}",
    ]


def check_out(what: str, own: Own) -> None:
    """Raises UserError where the result could not be written, before it is worked out."""
    out = own.words.get("--out")
    if out is None:
        if what in ("fit", "measure"):
            raise UserError("--out FILE.json is missing: where the constants go")
        return
    path = Path(out)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"--out {out}: cannot be written; give a file in a folder that exists")


def run(what: str, argv: list[str]) -> list[str]:
    """The lines of a command. Raises UserError for what the user can fix."""
    own = take_own(what, argv)
    check_out(what, own)
    if what in OF_A_DEVICE:
        return time_lines(what, own)
    if what == "validate":
        return validate(own)
    if what == "fit":
        return fit_device(own)
    if what == "measure":
        if own.rest:
            raise ArgumentErrors([f"{word}: unexpected argument" for word in own.rest])
        hardware, sources = measure_machine(dict(os.environ))
        return written_out(own, hardware, sources)
    return plan(what, own)


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    escape_unencodable()
    argv = sys.argv[1:] if argv is None else argv
    if (
        not argv
        or argv[0] not in (*NUMBERS, *WORDS)
        or any(word in ("-h", "--help") for word in argv)
    ):
        print(__doc__.strip(), file=sys.stdout if "--help" in argv or "-h" in argv else sys.stderr)
        return 0 if "--help" in argv or "-h" in argv else 2
    gc.freeze()  # what has been imported stays: collections need not look at it
    try:
        print("\n".join(run(argv[0], argv[1:])))
    except UserError as error:
        print(explained(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
