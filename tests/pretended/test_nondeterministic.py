"""The pretended device raises for every operator that torch documents as raising in deterministic
mode, and for no other.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pretended.libraries import missing_compiler
from pretended.nondeterministic import ALLOWED, DOCUMENTED
from pretended.test_launches import compiled_environment

HERE = Path(__file__).resolve().parent

pytestmark = [
    pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler())),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which raises itself"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    """Outcomes of all calls, by whether the mode is on."""
    out = tmp_path_factory.mktemp("operators") / "found.json"
    command = [sys.executable, HERE / "nondeterministic.py", "--out", out]
    environment = compiled_environment() | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


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
