"""`--help`: the groups of flags, or one group; and the page that explains a flag."""

from __future__ import annotations

import re
import textwrap

from megatron.config.errors import ArgumentErrors, UserError, did_you_mean
from megatron.config.groups import GROUPS
from megatron.config.options import FIELDS, Option, key, options_by_flag, read_table

COMMANDS = read_table("""
--config: Read settings from this JSON or YAML file (as --print-config writes it); flags on the
    command line win.
--deepspeed_config: Compare this DeepSpeed JSON file with the flags: what it equals is noted, what
    contradicts is refused.
--print-config: Print the settings as JSON and exit; --config reads them back.
--dry-run: Check everything (files, tokenizer, batch arithmetic, memory) and exit without training.
""")
TAKES_FILE = ("--config", "--deepspeed-config")
HELP = {"--help": "Print the groups; --help GROUP the flags of one, --help all every flag."}
# The page that explains a flag: the first whose pattern matches `group.field`.
PAGES = (
    (r"\.(moe|num_experts|.*expert)", "docs/experts.md"),
    (r"\.(zero|optimizer_|param_)", "docs/zero.md"),
    (r"\.(recompute|memory|activation_offload|offload)", "docs/howto/out_of_memory.md"),
    (r"\..*(pipeline|virtual)", "docs/schedules.md"),
    (r"\..*_backend$", "docs/kernels.md"),
    (r"\.(device_memory|host_memory|hardware|world_size)", "docs/planning.md"),
    (r"^distributed", "docs/parallelism.md"),
    (r"^precision", "docs/numerics.md"),
    (r"^data", "docs/data.md"),
    (r"^checkpoint", "docs/checkpoint.md"),
    (r"^logging", "docs/logging.md"),
)


def help_text(argv: list[str]) -> str:
    """What a command line with --help prints; empty without it. Raises UserError."""
    for index, word in enumerate(argv):
        if word in ("--help", "-h"):
            group = argv[index + 1] if index + 1 < len(argv) else ""
            return _groups("" if group.startswith("-") else group)
    return ""


def _groups(name: str) -> str:
    """The flags of a group, of `all`, or without a name the groups."""
    flags: dict[str, list[Option]] = {group: [] for group in GROUPS}
    for option in FIELDS.values():
        flags[option.group].append(option)
    if name == "all":
        return _listing(flags, commands=True)
    if name in flags:
        return _listing({name: flags[name]})
    if name:
        known, near = ", ".join(GROUPS), did_you_mean(name, GROUPS)
        raise UserError(f"--help {name}: no such group; the groups are {known}, all{near}")
    lines = [f"  {each:13} {len(flags[each]):3} flags: {GROUPS[each].__doc__}" for each in flags]
    return _listing({}, commands=True) + "\n".join(["\ngroups:", *lines])


def explained(error: UserError) -> str:
    """The text of an error, with the pages that explain the flags of its faults."""
    pages: dict[str, None] = {}
    for fault in error.faults if isinstance(error, ArgumentErrors) else []:
        option, _ = options_by_flag().get(key(re.split(r"[\s:]", fault)[0]), (None, True))
        place = f"{option.group}.{option.field}" if option else ""
        found = [name for pattern, name in PAGES if re.search(pattern, place)]
        pages |= dict.fromkeys(found[:1])
    return f"{error}\nexplained in {', '.join(pages)}" if pages else str(error)


def _listing(groups: dict[str, list[Option]], *, commands: bool = False) -> str:
    lines = ["usage: pretrain_gpt.py --flag value ..."]
    if commands:
        lines += ["", "command:"]
        for name, text in {**HELP, **COMMANDS}.items():
            takes = "FILE" if key(name) in TAKES_FILE else ""
            lines += _entry((name,), "[GROUP]" if name in HELP else takes, text)
    for title, chosen in groups.items():
        lines += ["", f"{title}:"]
        for option in chosen:
            default = "" if option.default is None else f" (default: {option.default})"
            lines += _entry(option.spellings, _metavar(option), option.help + default)
    return "\n".join(lines) + "\n"


def _metavar(option: Option) -> str:
    value = "" if option.kind is bool else option.kind.__name__.upper()
    if option.choices:
        value = "{" + ",".join(map(str, option.choices)) + "}"
    return value + " ..." if option.many else value


def _entry(names: tuple[str, ...], value: str, text: str) -> list[str]:
    indent = " " * 6
    wrapped = textwrap.fill(text, 80, initial_indent=indent, subsequent_indent=indent)
    return [f"  {', '.join(names)} {value}".rstrip(), wrapped]
