"""The program equals a trainer that shares no code with it: losses, norms, rates, evaluations,
counts and final weights of every case.
"""

import ast
import re
from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from oracle.cases import CASES, FACTORS, MIXED, NAMED, mixed_rows, pairs_of
from oracle.compare import differences, expected, narrow_bound
from oracle.mutants import MUTANTS
from oracle.philox import philox

HERE = Path(__file__).parent


def flags_of(parameters) -> frozenset[str]:
    """The flags of a case, with values that are words; how many times it resumes."""
    case = parameters["case"]
    text = " ".join([case.flags, case.first, *case.then, case.layout, case.narrow or ""])
    words = [re.split(r"[ ,|]+", each) for each in text.split("--")]
    shown = {(name, word) for name, *values in words for word in values if word.isidentifier()}
    return frozenset(shown | {name for name, *_ in words} | {f"{len(case.then)} resumes"})


MUTANTS_OF = Counter(mutant.where for mutant in MUTANTS)


@pytest.mark.table(
    traits=flags_of, always=[name for name, count in MUTANTS_OF.items() if count > 1]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_program_is_the_oracle(case, gloo_world):
    assert [each.text for each in differences(case, gloo_world)] == []


# counter | key | the known answer of the authors' Random123
ANSWERS = """
00000000 00000000 00000000 00000000 | 00000000 00000000 | 6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff | ffffffff ffffffff | 408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344 | a4093822 299f31d0 | d16cfe09 94fdcceb 5001e420 24126ea1
"""


@pytest.mark.parametrize("row", ANSWERS.strip().splitlines(), ids=["zeros", "ones", "pi"])
def test_philox_has_its_published_answers(row):
    counter, key, words = ([int(word, 16) for word in text.split()] for text in row.split("|"))
    assert philox(np.array(counter, np.uint64), tuple(key)).tolist() == words


def test_the_oracle_imports_nothing_of_the_product():
    """Only what runs and breaks the program may: a new module of the oracle is held to it."""
    own = {"program", "compare", "find_mutants", "mutants"}
    names = {path.stem for path in HERE.glob("*.py") if not path.name.startswith("test_")}
    assert own < names
    for name in sorted(names - own):
        tree = ast.parse((HERE / f"{name}.py").read_text())
        modules = [
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        ]
        modules += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        theirs = ("megatron", "kernels", "pretrain_gpt", "importlib")
        assert not [module for module in modules if module.split(".")[0] in theirs], name
        assert not {f"oracle.{each}" for each in own} & set(modules), name
        assert "__import__" not in {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}, name


def test_overflows_are_decided_with_room():
    """In fp16 the oracle and the program overflow in the same steps: no largest gradient lies near
    the threshold.
    """
    for case in CASES:
        if case.narrow == "fp16":
            assert min(outcome.margin for outcome in expected(case)) > 1 + narrow_bound(
                "fp16", 2
            ), case


def test_the_documented_numbers_of_configurations():
    """docs/testing.md, "The second trainer"."""
    text = " ".join((HERE.parents[1] / "docs/testing.md").read_text().split())
    factors = [[(name, value) for value in values] for name, values in FACTORS.items()]
    pairs = sum(len(a) * len(b) for a, b in combinations(factors, 2))
    covered = set().union(*map(pairs_of, mixed_rows()))
    parallel = sum(case.ranks > 1 for case in NAMED)
    assert re.findall(r"(\d+) configurations", text) == [str(len(CASES))] * 2 + [str(len(NAMED))]
    assert f"{parallel} of them on two or four ranks" in text
    assert f"- {len(MIXED)} mix {len(FACTORS)} choices" in text
    assert f"{len(covered)} of the {pairs} pairs of values occur together" in text


def test_every_value_of_every_choice_is_in_a_row():
    for factor, values in FACTORS.items():
        assert {row[factor] for row in mixed_rows()} == set(values), factor
