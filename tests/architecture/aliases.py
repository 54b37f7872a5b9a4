"""Outputs of autograd.Functions that share their tensor with an intermediate result.

torch.compile in 2.11 makes every intermediate tensor of a traced `forward` an output of it. An
in-place operator, a conversion to the dtype that a tensor has, and an `out` argument return the
tensor that they were given, which is then an output twice: autograd attaches it to the last one,
and the gradient of the first is lost without an error (pytorch issue 180642). Backward passes are
not affected: their intermediate results stay inside.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

# methods that return their tensor where there is nothing to convert
CONVERSIONS = frozenset(
    {"to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous"}
)
# Functions that torch.compile never traces
NEVER_TRACED = {
    "_WeightedActivation": "--torch-compile is refused with --num-experts",
    "_PutPiece": "--torch-compile is refused with --tiled-mlp",
    "_Gated": "compile_layers takes plain operations in its place",
    "_SquaredReLU": "compile_layers takes plain operations in its place",
    "_RowLinear": "an opaque operator calls it",
}

Fault = tuple[int, str]


def aliased_outputs(tree: ast.Module) -> Iterator[tuple[str, Fault]]:
    """(class, (line, what)) for each output of a `forward`, functions of the module included."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        if any(ast.unparse(base).endswith("autograd.Function") for base in node.bases):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "forward":
                    for fault in _Outputs(method, functions).faults():
                        yield node.name, fault


class _Outputs:
    """The values that a function may return."""

    def __init__(self, function: ast.FunctionDef, functions: dict[str, ast.FunctionDef]):
        self.function, self.functions = function, functions
        self.inputs = {argument.arg for argument in function.args.args}
        self.values: dict[str, list[ast.expr]] = {}  # by name
        self.renamed: dict[str, ast.AST] = {}  # name -> what makes another name of its tensor
        self.guarded: set[ast.AST] = set()  # conversions to another dtype alone
        for node in ast.walk(function):
            if isinstance(node, ast.If | ast.IfExp) and ".dtype" in ast.unparse(node.test):
                self.guarded.update(ast.walk(node))
        for node in ast.walk(function):
            self._add(node)

    def _add(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            self._assign(node.target, node.value)
        elif isinstance(node, ast.AugAssign):
            self.renamed[ast.unparse(node.target)] = node
        elif isinstance(node, ast.Call) and self._returns_its_tensor(node):
            self.renamed[ast.unparse(node.func.value)] = node  # type: ignore[attr-defined]

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.values.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for name, each in zip(target.elts, value.elts, strict=False):
                self._assign(name, each)

    def _returns_its_tensor(self, call: ast.Call) -> bool:
        """Whether it is a method that may return the tensor that it is a method of."""
        if not isinstance(call.func, ast.Attribute):
            return False
        name = call.func.attr
        in_place = name.endswith("_") and not name.endswith("__")
        return in_place or name in CONVERSIONS and call not in self.guarded

    def faults(self, seen: frozenset[str] = frozenset()) -> Iterator[Fault]:
        for node in ast.walk(self.function):
            if isinstance(node, ast.Return) and node.value is not None:
                yield from self._faults_of(node.value, seen)

    def _faults_of(self, value: ast.expr, seen: frozenset[str]) -> Iterator[Fault]:
        """`seen`: names that were followed already."""
        if isinstance(value, ast.Tuple | ast.List):
            for each in value.elts:
                yield from self._faults_of(each, seen)
        elif isinstance(value, ast.IfExp):
            yield from self._faults_of(value.body, seen)
            yield from self._faults_of(value.orelse, seen)
        elif isinstance(value, ast.Name) and value.id not in seen:
            if value.id in self.renamed:
                yield self._fault(self.renamed[value.id])
            if value.id in self.inputs and value.id not in self.values:
                yield self._fault(value)
            for each in self.values.get(value.id, ()):
                yield from self._faults_of(each, seen | {value.id})
        elif isinstance(value, ast.Call):
            into = any(keyword.arg == "out" for keyword in value.keywords)
            if into or self._returns_its_tensor(value):
                yield self._fault(value)
            helper = self.functions.get(ast.unparse(value.func))
            if helper is not None and helper.name not in seen:
                yield from _Outputs(helper, self.functions).faults(seen | {helper.name})

    def _fault(self, node: ast.AST) -> Fault:
        return node.lineno, ast.unparse(node)  # type: ignore[attr-defined]
