"""Runs on a GPU that exists in types only: each ends, and its host waits only where it must.

Where that is (`expected`):
- in an iteration for the numbers of the one before, unless those have been read already. Behind
  them the device has the whole forward and backward pass of the iteration to do; with a loss scale
  that follows them, nothing.
- between iterations, when something is due, for the numbers of this one, and once more before an
  evaluation.
- in the evaluation of a source for each turn's exchange of signals, one turn later, and once for
  the loss.
- in the first iteration for the copy of the rotary frequencies.
- in saves, which this does not count.

No operator of a run has an undefined order in deterministic mode, which is the default.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from pretended.device import Wait
from pretended.process import MARKS, found_by
from pretended.train import CASES, FAULTS, Case

pytestmark = MARKS

LOG, EVALUATION, SAVE = 2, 4, 4  # intervals of train.MODEL and of cases that save
# the others are a campaign
OFTEN = """llama; dropout; offload; fp16; torch; zero 3; fp8, blocks; experts; experts, loop;
experts, pairs; context parallel, ring, documents; short""".replace("\n", " ").split("; ")
DEFAULT = ("zero 3",)
ERRORS = {  # with which a run ends by a fault that is no wait
    "mask": "DynamicOutputShapeException",  # torch's fake tensors end there
    # torch 2.13's words, 2.11's
    "devices": "Expected all tensors to be on the same|two different devices",
    "order": "aten.cumsum.default does not have a deterministic implementation",
}
SHARE = 0.7  # of an iteration's operations: the forward and backward passes have more


def train(folder: Path, names: list[str]) -> dict[str, dict]:
    """What train.py found of each case."""
    found = found_by("train.py", folder, *names)
    for result in found.values():
        result["waits"] = [Wait(*wait) for wait in result["waits"]]
    return found


@pytest.fixture(scope="module")
def often(tmp_path_factory, request) -> dict[str, dict]:
    """Those of OFTEN and of the faults that are tested, by one process."""
    items = [item for item in request.session.items if item.path == request.path]
    tested = {item.callspec.id if hasattr(item, "callspec") else item.name for item in items}
    names = [name for name in OFTEN if name in tested]
    names += [f"short+{fault}" for fault in FAULTS if fault in tested]
    return train(tmp_path_factory.mktemp("pretended"), names)


def due(case: Case, iteration: int) -> bool:
    """Whether the loop does something after an iteration."""
    saves = case.saves and iteration % SAVE == 0
    return iteration % LOG == 0 or saves or iteration == case.iterations


def evaluated(case: Case, iteration: int) -> int:
    """Sources that are evaluated after an iteration, the test split behind the last."""
    if not case.evaluations:
        return 0
    return 2 if iteration == case.iterations else int(iteration % EVALUATION == 0)


def expected(case: Case) -> Counter[tuple[str, int, str]]:
    """How often the host waits: by phase, iteration and what for."""
    waits: Counter[tuple[str, int, str]] = Counter()
    if "--position-embedding-type" in case.flags:
        waits["training", 1, "copy to the device"] = 1
    for iteration in range(1, case.iterations + 1):
        if iteration > 1 and not due(case, iteration - 1):
            waits["training", iteration, "event"] = 1
        if due(case, iteration):
            waits["loop", iteration, "event"] = 1
        sources = evaluated(case, iteration)
        if sources:
            turns = 2 * case.micro_batches  # of --eval-iters 2
            waits["evaluation", iteration, "event"] = sources * (turns - 1)
            waits["evaluation", iteration, "numbers read"] = sources * (1 + turns * case.experts)
        if case.experts:
            waits["training", iteration, "numbers read"] = case.micro_batches * case.experts
    return waits


def faults(case: Case, result: dict) -> list[str]:
    """What is not as it should be in a run."""
    if result["code"] != 0:
        return [result["error"] or f"exit code {result['code']}"]
    waits = [wait for wait in result["waits"] if wait.phase != "save"]
    found = Counter((wait.phase, wait.iteration, wait.what) for wait in waits)
    wanted = expected(case)
    wrong = [
        f"{found[key]} of {key}, not {wanted[key]}"
        for key in sorted({*found, *wanted})
        if found[key] != wanted[key]
    ]
    passes = SHARE * result["operations"]["training"] / case.iterations
    for wait in waits:
        if wait.phase == "training" and wait.what == "event":
            if (wait.behind > passes) == case.dynamic_scale:
                wrong.append(f"{wait}: {wait.behind} operations behind it")
    return wrong


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.full) for name in OFTEN],
)
def test_a_run_waits_for_nothing_else(often, name):
    assert faults(CASES[name], often[name]) == []


@pytest.mark.campaign
@pytest.mark.parametrize("name", [name for name in CASES if name not in OFTEN])
def test_every_other_run_waits_for_nothing_else(tmp_path, name):
    found = train(tmp_path, [name])
    assert faults(CASES[name], found[name]) == []
    saved = [wait for wait in found[name]["waits"] if wait.phase == "save"]
    assert bool(saved) == CASES[name].saves


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.default("item", "devices")
def test_a_fault_behind_each_layer_is_found(often, fault):
    wrong = faults(CASES["short"], often[f"short+{fault}"])
    if fault in ERRORS:
        assert len(wrong) == 1 and re.search(ERRORS[fault], wrong[0])
        return
    layers, passes = 2, CASES["short"].micro_batches
    for iteration, found in zip((1, 2), wrong, strict=True):
        assert found.startswith(f"{layers * passes} of ('training', {iteration}, ")
        assert "not 0" in found
