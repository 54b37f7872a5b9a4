"""The pretended device raises for every operator that torch documents as raising in deterministic
mode, and for no other.
"""

from __future__ import annotations

import re

import pytest
import torch
from pretended.nondeterministic import ALLOWED, DOCUMENTED
from pretended.process import MARKS, found_by

pytestmark = MARKS


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    """Outcomes of all calls, by whether the mode is on."""
    return found_by("nondeterministic.py", tmp_path_factory.mktemp("operators"))


def test_what_torch_documents_is_tried():
    text = torch.use_deterministic_algorithms.__doc__
    listed = text.split("operations will throw a")[1].split("In addition")[0]
    names = {name.split(".")[-1] for name in re.findall(r"\* :\w+:`([\w.]+)`", listed)}
    assert len(names) > 20 and names <= set(DOCUMENTED)


def test_each_documented_operator_raises(found):
    wrong = {
        name: outcomes
        for name, outcomes in found["True"]["documented"].items()
        if any(outcome != "raised" for outcome in outcomes)
    }
    assert wrong == {} and set(found["True"]["documented"]) == set(DOCUMENTED)


def test_other_operators_do_not_raise(found):
    assert set(found["True"]["allowed"]) == set(ALLOWED)
    assert not any(found["True"]["allowed"].values())


def test_nothing_raises_without_the_mode(found):
    outcomes = [
        *found["False"]["allowed"].values(),
        *sum(found["False"]["documented"].values(), []),
    ]
    assert "raised" not in outcomes
