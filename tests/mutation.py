"""Mistakes that the tests must find: a small edit of a named function, undone afterwards.

A table of mutants is text:

    = megatron/model/mlp.py MLP.__init__
    no sum of row-parallel biases | documents tp2 sp
        grad_sum=tp.sequence => grad_sum=False

A line with `=` names the function that the lines after it edit; `name | where` begins a mutant,
`where` being the row, the case or the file of tests that must find it; indented lines are its
edits, `old => new`. Lines that are indented further continue `new`. `old` is found by its tokens
(fragments.py), once in the function.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import CodeType, FunctionType

from fragments import places, replaced

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def spans(file: str) -> dict[str, tuple[int, int]]:
    """The first and last line of each function of a file, by qualified name."""
    found: dict[str, tuple[int, int]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                # the first of several definitions, as of a property and its setter
                found.setdefault(prefix + child.name, (child.lineno, child.end_lineno))
            elif isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(ast.parse((ROOT / file).read_text()), "")
    return found


def code_of(code: CodeType, name: str) -> Iterator[CodeType]:
    """The functions of that qualified name in compiled code."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if each.co_qualname == name and each.co_flags & inspect.CO_OPTIMIZED:
                yield each
            yield from code_of(each, name)


@dataclass(frozen=True)
class Edit:
    """Each `old` becomes `new` in a function of a file."""

    file: str
    function: str
    changes: tuple[tuple[str, str], ...]

    def text(self) -> str:
        """The edited file. AssertionError when an `old` is not in the function exactly once."""
        lines = (ROOT / self.file).read_text().splitlines(keepends=True)
        assert self.function in spans(self.file), f"{self.file} has no function {self.function}"
        first, last = spans(self.file)[self.function]
        body = "".join(lines[first - 1 : last])
        for old, new in self.changes:
            # further lines of `new` are indented as the line that `old` begins in
            before = body[: places(body, old)[0][0]] if places(body, old) else ""
            line = before.rpartition("\n")[2]
            indent = "\n" + line[: len(line) - len(line.lstrip())]
            body = replaced(body, old, new.replace("\n", indent))
        return "".join([*lines[: first - 1], body, *lines[last:]])

    def live(self) -> FunctionType:
        """The function that the process calls."""
        name = self.file.removesuffix(".py").replace("/", ".")
        # kernels and tools are parts of the package megatron (megatron/__init__.py)
        module = importlib.import_module(
            name if name.startswith("megatron") else f"megatron.{name}"
        )
        found = attrgetter(self.function)(module)
        if isinstance(found, functools.cached_property):
            return found.func
        return inspect.unwrap(found.fget if isinstance(found, property) else found)

    def code(self) -> CodeType:
        """The function's code with the changes."""
        module = compile(self.text(), str(ROOT / self.file), "exec", dont_inherit=True)
        return next(code_of(module, self.function))


@dataclass(frozen=True)
class Mutant:
    """A mistake, and where it must be found."""

    name: str
    where: str
    edits: tuple[Edit, ...]

    @contextlib.contextmanager
    def put_in(self) -> Iterator[None]:
        """In the block this process has the mistake, whatever has imported the functions."""
        with contextlib.ExitStack() as stack:
            stack.callback(clear_caches)
            for edit in self.edits:
                function, code = edit.live(), edit.code()
                stack.callback(setattr, function, "__code__", function.__code__)
                function.__code__ = code
            clear_caches()
            yield


def clear_caches() -> None:
    """Forget the results that functions of the program have kept."""
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def read_mutants(table: str) -> tuple[Mutant, ...]:
    """The mutants of a table."""
    found: list[Mutant] = []
    file = function = ""
    changes: list[tuple[str, str]] = []
    for line in [*table.splitlines(), "= end end"]:
        if line and not line.startswith(" ") and changes:
            found[-1] = replace(found[-1], edits=(Edit(file, function, tuple(changes)),))
            changes = []
        if line.startswith("= "):
            file, function = line[2:].split()
        elif line.startswith(8 * " "):
            old, new = changes[-1]
            changes[-1] = old, f"{new}\n{line.strip()}".strip()
        elif line.startswith("    "):
            old, _, new = line.partition("=>")
            changes.append((old.strip(), new.strip()))
        elif line:
            name, where = line.split(" | ")
            found.append(Mutant(name, where, ()))
    return tuple(found)


def check_mutants(mutants: tuple[Mutant, ...]) -> None:
    """Each is another program than the healthy one, and no two have the same name. AssertionError
    for an edit whose `old` is gone.
    """
    for mutant in mutants:
        for edit in mutant.edits:
            code, healthy = edit.code(), edit.live().__code__
            parts = "co_code", "co_consts", "co_names", "co_varnames"
            assert any(getattr(code, part) != getattr(healthy, part) for part in parts), mutant
            assert code.co_freevars == healthy.co_freevars, mutant
    assert len({mutant.name for mutant in mutants}) == len(mutants)
