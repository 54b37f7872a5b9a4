"""Compile every shipped kernel for a GPU without one, and compare what comes out with
kernels/manifest.json.

    python kernels/tools/manifest.py                    # compare
    python kernels/tools/manifest.py --quick            # those without the manifest's key
    python kernels/tools/manifest.py --only norm        # kernels with this in their name
    python kernels/tools/manifest.py --rows trial.py    # the rows of another file's `aot()`
    python kernels/tools/manifest.py --write            # write the manifest anew

The exit code is 1 where a kernel breaks a rule or differs from the manifest. --quick does not
compile what has the manifest's key: the compiler's own key of a kernel, its source, its options and
the architecture, from which nothing else can come out. --only prints what each kernel compiles to;
--rows is for trying configurations; --write is for a change that is meant.

The rows are those of kernels/tools/shipped.py, with the table kernels/configurations.json. Rules,
independent of the manifest: matrix products use wgmma on sm_90, tcgen05 on sm_100 and nothing
older, on sm_80 tensor cores and asynchronous copies; no wgmma waits for the one before it
(`serialised`), no thread signals that a buffer has been read before all warps have read it
(`unguarded`), no more bytes are spilled and no more shared memory is needed than the table's row.
What begins with hot_ is counted in the loop that does most of the work (kernels/tools/listing.py).
The manifest is keyed by Triton's version: with another one only the rules are checked. Compilation
runs in separate processes: the compiler can abort, and the row that it did that with is named.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a file
    sys.path[0] = str(ROOT)

from megatron.kernels import lang  # noqa: E402
from megatron.kernels.configurations import ARCHITECTURES, Row, shared_memory  # noqa: E402
from megatron.kernels.tools import listing  # noqa: E402
from megatron.kernels.tools.shipped import Compiled, compilations  # noqa: E402

MANIFEST = ROOT / "kernels/manifest.json"
COUNTED = {
    "wgmma": r"HGMMA",
    "old_mma": r"HMMA",
    "tma_loads": r"UTMALDG",
    "tma_stores": r"UTMASTG",
    "loads_128": r"LDG\.E.*\.128",
    "stores_128": r"STG\.E.*\.128",
    "atomics": r"(RED|ATOM)",
}
COUNTED_TOO = {80: {"cp_async": r"LDGSTS"}, 100: {"tcgen05": r"UTC\w*MMA"}}  # by major version
# what matrix products have to be, by major version; on a newer one as on sm_80
PRODUCTS = {80: ("old_mma", "HMMA"), 90: ("wgmma", "wgmma"), 100: ("tcgen05", "tcgen05")}
ORDER = 0.02  # measured: up to 0.7%, by the order in which the compiler goes over its sets
SPILL = 8  # measured: 152 and 160 bytes of one kernel, by the same
# of kernels that are written warp by warp
MUST_OCCUR = {
    "setmaxnreg": "no register changes hands between warps: ask for counts that sum up to what "
    "the block has",
    "overlapped": "no exponential is computed while a product runs: the wait for the product has "
    "moved up",
}
Facts = dict[str, Any]


def rows(file: str | None = None, only: str = "") -> dict[str, Compiled]:
    """All shipped compilations by name, or those of a file."""
    found: dict[str, Compiled] = {}
    if file is None:
        compiled = [
            row if arch == lang.HOPPER else replace(row, arch=arch, name=f"sm_{arch} {row.name}")
            for arch in ARCHITECTURES
            for row in compilations(arch)
        ]
    else:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        compiled = module.aot()
    for row in compiled:
        assert row.name not in found, f"two rows are called {row.name}"
        found[row.name] = row
    return {name: row for name, row in found.items() if only in name}


def source_of(row: Compiled) -> tuple[Any, dict[str, Any]]:
    """What Triton compiles, and its options."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = row.kernel.arg_names
    places = {name: at for at, name in enumerate(names)}
    missing = places.keys() - row.signature.keys() - row.constants.keys()
    assert not missing, f"{row.name}: no type for {', '.join(sorted(missing))}"
    divisible: list[tuple[int, ...]] = [(places[name],) for name in row.divisible]
    for name, kind in row.signature.items():
        if isinstance(kind, tuple):  # pointer, length, width, strides: all but the length
            divisible += [(places[name], part) for part in range(len(kind)) if part != 1]
    types = {**row.signature, **dict.fromkeys(row.constants, "constexpr")}
    source = (GluonASTSource if row.kernel.is_gluon() else ASTSource)(
        fn=row.kernel,
        signature={name: types[name] for name in names},
        constexprs={(places[name],): value for name, value in row.constants.items()},
        attrs={place: [["tt.divisibility", 16]] for place in divisible},
    )
    return source, {"num_warps": row.num_warps, "num_stages": row.num_stages, **row.options}


def key_of(row: Compiled) -> str:
    """Triton's own key of what it compiles, with the options and the architecture."""
    source, options = source_of(row)
    text = f"{source.hash()} {sorted(options.items())} {row.arch}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def forget_lines() -> None:
    """Let keys not know on which line of its file a function begins."""
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.kernels"):
            for each in vars(module).values():
                if hasattr(each, "starting_line_number"):
                    each.starting_line_number = 1


def compile_row(row: Compiled) -> Facts:
    """What the kernel compiles to: registers of a thread, bytes that it spills and shared memory of
    a block, counts of instructions.
    """
    from triton.backends.compiler import GPUTarget

    source, options = source_of(row)
    return read_cubin(
        lang.triton.compile(source, target=GPUTarget("cuda", row.arch, 32), options=options),
        row.arch,
        row.kernel.is_gluon(),
    )


def read_cubin(compiled: Any, arch: int, gluon: bool) -> Facts:
    """Of a kernel that is written warp by warp also: changes of its warps' registers, exponentials
    that are computed while a product runs, and buffers released before all warps have read them.
    """
    tools = Path(lang.triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run(
                [tools / command[0], *command[1:], file.name],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for command in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "-c"))
        )
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    instructions = re.findall(
        r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", code, re.MULTILINE
    )
    patterns = COUNTED | COUNTED_TOO.get(arch // 10 * 10, {})
    counts = {name: listing.count(pattern, instructions) for name, pattern in patterns.items()}
    if gluon:
        counts |= {
            "setmaxnreg": sum(each.startswith("USETMAXREG") for each in instructions),
            "overlapped": listing.overlapped(code),
            "unguarded": listing.unguarded(code),
        }
    return {
        "registers": registers,
        "spilled": stack,
        "shared": compiled.metadata.shared,
        "instructions": len(instructions),
        **counts,
        **listing.facts(code),
    }


def faults(row: Compiled, facts: Facts) -> list[str]:
    """The rules that a compilation breaks."""
    if "error" in facts:
        return [facts["error"]]
    return list(_broken_rules(row, facts))


def _broken_rules(row: Compiled, facts: Facts) -> Iterator[str]:
    accepted = row.row or Row("", row.arch, {}, {})
    wanted, called = PRODUCTS.get(row.arch // 10 * 10, PRODUCTS[80])
    old = facts["old_mma"]
    if row.matmul and (facts[wanted] == 0 or wanted != "old_mma" and old > 0):
        yield (
            f"{facts[wanted]} {called} and {old} older matrix instructions: a tile is too small "
            f"for {called}"
        )
    if row.matmul and facts.get("cp_async") == 0:
        yield "no asynchronous copies: its loads wait for memory"
    for name, message in MUST_OCCUR.items():
        if facts.get(name) == 0:
            yield message
    if facts.get("unguarded"):
        yield (
            f"{facts['unguarded']} arrivals at an mbarrier without a barrier of threads since the "
            "last wait for products, which other warps may still run: use release()"
        )
    if facts.get("serialised") and not accepted.serialised:
        yield (
            f"{facts['serialised']} of {facts['wgmma']} wgmma wait for the one before: registers "
            "are short: take a greater maxnreg, smaller tiles or more warps"
        )
    if facts["spilled"] > accepted.spills:
        yield (
            f"{facts['spilled']} bytes are spilled, {accepted.spills} are accepted: take smaller "
            "tiles or more warps"
        )
    shared = accepted.shared or shared_memory(row.arch)
    if facts["shared"] > shared:
        yield (
            f"{facts['shared']} bytes of shared memory, a block may have {shared}: take smaller "
            "tiles or fewer stages"
        )


def work(file: str | None, names: list[str], manifest: dict[str, Facts]) -> None:
    """Compile these rows, but those whose key this manifest has; a line of JSON for each."""
    known = rows(file)
    forget_lines()
    for name in names:
        try:
            key = {} if file else {"key": key_of(known[name])}
            held = manifest.get(name, {})
            again = file or held.get("key") != key["key"]
            facts = compile_row(known[name]) | key if again else held | {"held": True}
        except Exception as error:
            *_, last = ["", *str(error).strip().splitlines()]
            facts = {"error": f"does not compile: {type(error).__name__}: {last}"}
        print(json.dumps({name: facts}), flush=True)


def compile_all(
    names: list[str], jobs: int, file: str | None = None, *, quick: bool = False
) -> dict[str, Facts]:
    """What all of these compile to, by processes that may die."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, *(["--rows", file] if file else [])]
    command += [*(["--quick"] if quick else []), "--compile"]
    found: dict[str, Facts] = {}

    def compile_these(left: list[str]) -> None:
        while left:
            child = subprocess.run([*command, *left], capture_output=True, text=True, env=environ)
            for line in child.stdout.splitlines():
                found.update(json.loads(line))
            left = [name for name in left if name not in found]
            if left:
                *_, last = ["", *child.stderr.strip().splitlines()]
                error = f"the compiler died with code {child.returncode}: {last}"
                found[left.pop(0)] = {"error": error}

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(compile_these, [names[index::jobs] for index in range(jobs)]))
    return {name: found[name] for name in names}


def differences(found: dict[str, Facts], known: dict[str, Facts], *, whole: bool) -> list[str]:
    """Where compilations are not those of the manifest; `whole`: nothing may be in it that was not
    compiled.
    """
    lines = [f"{name}: not in the manifest" for name in found if name not in known]
    for name, facts in found.items():
        held = known.get(name, facts)
        for key in sorted((facts.keys() | held.keys()) - {"key", "held"}):
            one, other = facts.get(key), held.get(key)
            if not _same(key, one, other):
                lines.append(f"{name}: {key} {one}, the manifest has {other}")
    if whole:
        unknown = [name for name in known if name not in found]
        lines += [f"{name}: in the manifest, but no kernel has it" for name in unknown]
    return lines


def _same(key: str, found: Any, known: Any) -> bool:
    """Equal; numbers of all instructions to ORDER and spilled bytes to SPILL, since equal
    compilations differ by some moves where registers are short.
    """
    if found == known or None in (found, known):
        return found == known
    slack = {"instructions": ORDER * known, "hot_instructions": ORDER * known, "spilled": SPILL}
    return abs(found - known) <= slack.get(key, 0)


def parse_arguments() -> argparse.Namespace:
    """The command line. Ends the program for flags that do not go together."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="those without the manifest's key")
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels whose name contains it")
    parser.add_argument("--rows", metavar="FILE", help="a Python file with a function aot()")
    parser.add_argument("--write", action="store_true", help="write the manifest")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--compile", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if lang.triton is None:
        parser.error("Triton is not installed: pip install triton==3.6.0")
    if arguments.write and (arguments.rows or arguments.quick):
        parser.error("--write: the manifest is that of all kernels/; drop --rows and --quick")
    if not arguments.compile and not rows(arguments.rows, arguments.only):
        parser.error(
            f"--only {arguments.only}: no kernel is called so; there are "
            f"{', '.join(rows(arguments.rows))}"
        )
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.compile:
        held = json.loads(MANIFEST.read_text()).get(lang.triton.__version__, {})
        work(arguments.rows, arguments.compile, held if arguments.quick else {})
        return 0
    selected = rows(arguments.rows, arguments.only)
    found = compile_all(list(selected), arguments.jobs, arguments.rows, quick=arguments.quick)
    broken = [
        f"{name}: {fault}" for name, row in selected.items() for fault in faults(row, found[name])
    ]
    broken += keep_or_compare(arguments, found, selected)
    print(*broken, sep="\n")
    held = sum("held" in found[name] for name in selected)
    print(
        f"{len(selected) - held} kernels compiled with Triton {lang.triton.__version__}, "
        f"{len(broken)} faults" + (f"; {held} have the manifest's key" if held else "")
    )
    return 1 if broken else 0


def keep_or_compare(
    arguments: argparse.Namespace, found: dict[str, Facts], selected: dict[str, Any]
) -> list[str]:
    """Write what was found into the manifest, or report what differs from it."""
    version = lang.triton.__version__
    manifest = json.loads(MANIFEST.read_text())
    for name in selected if arguments.only or arguments.rows else ():
        print(name, json.dumps(found[name]))
    if arguments.write:
        kept = manifest.get(version, {}) if arguments.only else {}
        MANIFEST.write_text(_as_table({version: dict(sorted((kept | found).items()))}))
    elif arguments.rows:
        return []
    elif version in manifest:
        return differences(found, manifest[version], whole=not arguments.only)
    else:
        print(
            f"the manifest is of Triton {', '.join(manifest)}, this is {version}: only the "
            "rules are checked"
        )
    return []


def _as_table(manifest: dict[str, dict[str, Facts]]) -> str:
    """JSON with a line for each kernel that compiles."""
    parts = [
        f'"{version}": {{\n'
        + ",\n".join(
            f"{json.dumps(name)}: {json.dumps(facts)}"
            for name, facts in kernels.items()
            if "error" not in facts
        )
        + "\n}"
        for version, kernels in manifest.items()
    ]
    return "{" + ",\n".join(parts) + "}\n"


if __name__ == "__main__":
    sys.exit(main())
