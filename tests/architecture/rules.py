"""The rules of the code that a machine can check. `breaches(root)` lists every one that a checkout
breaks, as `file:line: what`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from aliases import NEVER_TRACED, aliased_outputs

# Package -> what it may import of the others; `config` and the package itself go without saying.
# Lower packages know nothing of upper ones.
BASE = {"kernels", "distributed"}
MAY_IMPORT: dict[str, set[str]] = {
    "config": set(),
    "kernels": set(),
    "distributed": set(),
    "model": BASE,
    "parallel": BASE | {"model"},
    "optimizer": BASE | {"model", "parallel"},
    "checkpoint": BASE | {"model", "parallel", "optimizer"},
    "data": set(),
    "observe": set(),
    "training": BASE | {"model", "parallel", "optimizer", "checkpoint", "data", "observe", ""},
}
PROGRAMS = ("tools.", "benchmarks.", "campaigns.", "kernels.tools.")  # as names in `megatron`
PROGRAM_FOLDERS = ("megatron", "kernels", "tools", "benchmarks", "scripts")
LONGEST_FILE = 850  # lines of at most 100 columns; the aim is 500
LARGEST_FUNCTION = 350  # syntax nodes; kernels that Triton compiles may have more
# optional libraries by a name that they are given; candidates of kernels; the tools of commands
COMPUTED_IMPORTS = {
    *("megatron/data/tokenizer.py", "kernels/apex.py", "kernels/dispatch.py"),
    "mgpt_commands.py",
}
PICKLE_MODULES = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
PICKLE_CALLS = {"torch.load", "torch.save", "numpy.load", "np.load"}
PICKLE_CALLS |= {"pickle.load", "pickle.loads", "pickle.Unpickler"}
# reads other programs' files by torch.load(..., weights_only=True), and by a subclass of
# pickle.Unpickler that finds stand-ins alone
PICKLE_READER = "tools/_convert/pickles.py"
# times others' formats; what it writes is deleted unread
PICKLE_MEASURED = {"benchmarks/peers/checkpoint_rank.py"}
# run as a file, a tool finds `megatron` by it
PATH_EDITS = {"tools/_checkout.py"}
MACHINE_PATH = re.compile(r"(?<![\w.~}])/(?:work|root|home|farm|Users|tmp|opt|scratch)/\w")


def breaches(root: Path) -> list[str]:
    """Every broken rule in the checkout at `root`."""
    found = list(_packages(root))
    classes: dict[str, str] = {}  # name -> where it is
    for path in _python_files(root):
        name = path.relative_to(root).as_posix()
        text = path.read_text()
        tree = ast.parse(text, name)
        nodes = list(ast.walk(tree))
        lines = text.count("\n") + 1
        if lines > LONGEST_FILE:
            most = f"the most is {LONGEST_FILE}: split the file or delete something"
            found.append(f"{name}:{LONGEST_FILE}: {lines} lines; {most}")
        for line, module in _imports(nodes, name):
            found += [f"{name}:{line}: {problem}" for problem in _import_problems(name, module)]
        found += [f"{name}:{line}: {problem}" for line, problem in _statements(nodes, name)]
        if name.startswith(("megatron/", "kernels/", "tools/_")):
            found += [f"{name}:{line}: {problem}" for line, problem in _large(nodes)]
            found += [f"{name}:{line}: {problem}" for line, problem in _aliased(tree)]
        for node in nodes if _in_library(name) else ():
            if isinstance(node, ast.ClassDef):
                first = classes.setdefault(node.name, f"{name}:{node.lineno}")
                if first != f"{name}:{node.lineno}":
                    other = f"there is a class {node.name} in {first} already"
                    found.append(f"{name}:{node.lineno}: {other}: a name means one thing")
        found += [
            f"{name}:{line}: a path of one machine: {value!r}"
            for line, value in _strings(nodes)
            if MACHINE_PATH.search(value)
        ]
    texts = [*root.glob("scripts/**/*.sh"), *root.glob("*.md"), *root.glob("docs/**/*.md")]
    for path in sorted([*texts, *root.glob(".ci/run")]):
        name = path.relative_to(root).as_posix()
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{name}:{number}: a path of one machine: {line.strip()}")
    return found


def _python_files(root: Path) -> list[Path]:
    files = [path for folder in PROGRAM_FOLDERS for path in (root / folder).rglob("*.py")]
    return sorted([*files, *root.glob("*.py")])


def _in_library(name: str) -> bool:
    """Whether an installation has this file: kernels/tools/ holds programs, which stay behind."""
    return name.startswith(("megatron/", "kernels/")) and not name.startswith("kernels/tools/")


def _packages(root: Path) -> Iterator[str]:
    """`kernels` is not a separate package, everything in megatron/ is one (an install would leave
    it out otherwise) and has its rule.
    """
    if (root / "kernels/__init__.py").exists():
        yield "kernels/__init__.py:1: must not exist: `kernels` belongs to another project"
    for folder in sorted({path.parent for path in (root / "megatron").rglob("*.py")}):
        name = folder.relative_to(root).as_posix()
        if not (folder / "__init__.py").exists():
            yield f"{name}/:1: has no __init__.py, so an installation would leave it out"
        if folder.parent == root / "megatron" and folder.name not in MAY_IMPORT:
            yield f"{name}/:1: is a package without a rule: add it to rules.MAY_IMPORT"


def _imports(nodes: list[ast.AST], name: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, wherever it is; `from a import b` gives
    a.b.
    """
    package = name.removesuffix(".py").split("/")[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _dotted(node.func).split(".")[-1] in (
            "import_module",
            "__import__",
        ):
            literal = node.args and isinstance(node.args[0], ast.Constant)
            yield node.lineno, str(node.args[0].value) if literal else "<computed>"


def _import_problems(name: str, module: str) -> Iterator[str]:
    top, _, rest = module.partition(".")
    if module == "<computed>" and name not in COMPUTED_IMPORTS:
        yield "imports a computed name, which the import rules cannot see"
    if top == "kernels":
        yield "imports `kernels`, which is another project: import megatron.kernels"
    if top in PICKLE_MODULES and (name, top) != (PICKLE_READER, "pickle"):
        yield f"imports {top}: nothing here reads or writes pickles"
    parts = name.split("/")
    package = None
    if _in_library(name):
        package = parts[0] if parts[0] == "kernels" else parts[1] if len(parts) > 2 else None
    if name == "megatron/__init__.py" and top == "megatron":
        yield "the package itself imports nothing of the project"
    if top != "megatron" or package is None:
        return
    if f"{rest}.".startswith(PROGRAMS):
        yield f"imports {module}, a program that an installation may not have"
        return
    target = rest.split(".")[0] if rest.split(".")[0] in MAY_IMPORT else ""
    allowed = MAY_IMPORT.get(package, set()) | {package, "config"}
    if target not in allowed and ".".join(rest.split(".")[:2]) not in allowed:
        names = ", ".join(sorted(allowed - {""}))
        yield f"{package} may not import {module} (it may import {names})"


def _statements(nodes: list[ast.AST], name: str) -> Iterator[tuple[int, str]]:
    """Pickle calls anywhere; sys.path in tools; `global` and environment variables inside the
    library.
    """
    library = _in_library(name)
    for node in nodes:
        if (
            isinstance(node, ast.Call)
            and _dotted(node.func) in PICKLE_CALLS
            and name not in PICKLE_MEASURED
        ):
            weights_only = any(
                word.arg == "weights_only" and getattr(word.value, "value", None) is True
                for word in node.keywords
            )
            if name != PICKLE_READER or _dotted(node.func) != "torch.load":
                yield (
                    node.lineno,
                    f"calls {_dotted(node.func)}: nothing here reads or writes pickles, but for "
                    f"{PICKLE_READER} (docs/checkpoint.md)",
                )
            elif not weights_only:
                yield node.lineno, "calls torch.load without weights_only=True"
        if (
            name.startswith("tools/")
            and name not in PATH_EDITS
            and isinstance(node, ast.Attribute)
            and _dotted(node) == "sys.path"
        ):
            yield node.lineno, "edits sys.path: import _checkout, as the other tools do"
        if library and isinstance(node, ast.Global):
            yield node.lineno, "global statement: pass the object down"
        asks = isinstance(node, ast.Call) and _dotted(node.func) in ("os.getenv", "os.environ.get")
        reads = (
            isinstance(node, ast.Subscript)
            and _dotted(node.value) == "os.environ"
            and isinstance(node.ctx, ast.Load)
        )
        if library and (asks or reads) and not name.startswith("megatron/distributed/"):
            yield node.lineno, "reads an environment variable: make it a flag"


def _large(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Functions that are too large to be read at once."""
    for node in nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        size = sum(1 for _ in ast.walk(node))
        decorators = [each for decorator in node.decorator_list for each in ast.walk(decorator)]
        compiled = any(_dotted(each).endswith("jit") for each in decorators)
        if size > LARGEST_FUNCTION and not compiled:
            most = f"the most is {LARGEST_FUNCTION}: split it"
            yield node.lineno, f"{node.name} has {size} syntax nodes; {most}"


def _aliased(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Outputs of traced autograd.Functions whose gradient torch.compile may lose."""
    for function, (line, what) in aliased_outputs(tree):
        if function not in NEVER_TRACED:
            yield (
                line,
                f"{function}.forward may return an input or an intermediate result itself: {what}; "
                "torch.compile in 2.11 loses its gradient: compute it out of place, convert it "
                "only to another dtype",
            )


def _strings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    return (
        (node.lineno, node.value)
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or attribute, else an empty string."""
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""
