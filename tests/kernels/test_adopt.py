"""From a measurement to a choice, on made-up results: what wins, what does not, what is kept,
and that dispatch reads it.
"""

import json
import random

import pytest
import torch
from megatron.kernels import dispatch
from megatron.kernels.dispatch import choose, read_measured
from megatron.kernels.tools import adopt as tool

ROLES = {"kernel": "ours", "rival": "torch", "": "liger"}


def row(operator, case, role, milliseconds, fault=None):
    """A row as the benchmark writes it, 3% of noise on its times."""
    draw = random.Random(f"{case}{role}")
    noise = [draw.uniform(0.97, 1.03) for _ in range(20)]
    times = [] if milliseconds is None else [milliseconds * each for each in noise]
    given = {"case": case, "operator": operator, "role": role, "fault": fault}
    given |= {"part": "memory", "implementation": ROLES[role]}
    return given | {"milliseconds": milliseconds, "all": times}


def pair(operator, case, ours, theirs):
    times = {"kernel": ours, "rival": theirs, "": 0.001}
    return [row(operator, case, role, time) for role, time in times.items()]


def results(*rows, **changes):
    about = {"device": "Made-up H200", "architecture": 90, "torch": "2.13.0", "triton": "3.6.0"}
    about |= {"date": "2000-01-01", "tiny": False, "finished": True}
    return about | {"rows": list(rows), **changes}


@pytest.fixture
def adopt(tmp_path):
    """(exit code, the rows by operator) after a result was adopted into one and the same file."""
    measured = tmp_path / "measured.json"
    measured.write_text('{"rows": []}')

    def run(found: dict) -> tuple[int, dict]:
        (tmp_path / "kernels.json").write_text(json.dumps(found))
        code = tool.main([str(tmp_path / "kernels.json")], measured)
        return code, {row["operator"]: row for row in json.loads(measured.read_text())["rows"]}

    run.file = measured
    return run


def test_what_wins_is_taken_by_auto(adopt, monkeypatch):
    norms = [*pair("norm", "forward", 1.0, 1.3), *pair("norm", "backward", 2.0, 2.8)]
    code, rows = adopt(results(*norms, *pair("rotary", "both", 2.0, 1.5)))
    norm = rows["norm"]
    assert code == 0 and norm["wins"] and norm["cases"] == 2 and not rows["rotary"]["wins"]
    assert norm["ratio"] == pytest.approx(4.1 / 3, rel=0.02)
    assert norm["low"] <= norm["ratio"] <= norm["high"]
    monkeypatch.setattr(dispatch, "MEASURED", read_measured(adopt.file))
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(dispatch.lang, "capability", lambda device: 90)
    monkeypatch.setattr(dispatch.lang, "unsupported_reason", lambda device, dtype: None)
    because = f"measured {norm['ratio']:.2f} times torch on Made-up H200"
    assert choose("norm", "auto", gpu, torch.bfloat16) == dispatch.Choice("triton", because)
    lost = choose("rotary", "auto", gpu, torch.bfloat16)
    assert lost.because.startswith(f"triton: measured {rows['rotary']['ratio']:.2f} times torch")
    # a measurement is of one architecture
    monkeypatch.setattr(dispatch.lang, "capability", lambda device: 100)
    assert choose("norm", "auto", gpu, torch.bfloat16).implementation == "torch"


HEAVY = pair("norm", "heavy", 10.0, 15.0)


@pytest.mark.parametrize(
    "cases, is_sure, wins",
    [
        (pair("norm", "forward", 1.0, 1.001), False, False),
        ([*HEAVY, *pair("norm", "light", 1.0, 0.8)], True, False),  # one that is clearly lost
        ([*HEAVY, *pair("norm", "light", 1.0, 0.98)], True, True),
    ],
    ids=["noise", "one case lost", "one case within the noise"],
)
def test_what_is_no_win(adopt, cases, is_sure, wins):
    norm = adopt(results(*cases))[1]["norm"]
    assert norm["high"] > 1 and (norm["low"] > 1, norm["wins"]) == (is_sure, wins)


@pytest.mark.parametrize(
    "broken",
    [
        row("norm", "backward", "kernel", 1.0),
        row("norm", "forward, result", "kernel", None, "AssertionError: off by 0.1 of the norm"),
    ],
    ids=["no rival", "fault"],
)
def test_what_was_not_measured_whole_stays_as_it_was(adopt, capsys, broken):
    _, before = adopt(results(*pair("norm", "forward", 1.0, 1.3), *pair("adam", "step", 1.0, 1.1)))
    rows = *pair("norm", "forward", 1.0, 0.5), broken, *pair("adam", "step", 1.0, 0.9)
    code, after = adopt(results(*rows, date="2000-02-02"))
    assert code == 0 and after["norm"] == before["norm"]
    assert not after["adam"]["wins"] and after["adam"]["date"] == "2000-02-02"
    assert "norm: " in capsys.readouterr().out


def test_an_interrupted_measurement_is_judged_but_for_its_last_operator(adopt, capsys):
    measured = [*pair("norm", "forward", 1.0, 1.3), *pair("adam", "step", 1.0, 1.1)]
    code, rows = adopt(results(*measured, finished=False))
    assert code == 0 and rows.keys() == {"norm"}
    assert "adam: the measurement was interrupted" in capsys.readouterr().out
    assert adopt(results(finished=False)) == (0, rows)
    assert adopt(results(*measured))[1].keys() == {"norm", "adam"}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tiny": True}, "measured with --tiny or on a CPU"),
        ({"rows": [{}]}, "no 'operator' in it: not a result of benchmarks/kernels.py"),
    ],
)
def test_what_shows_nothing_is_refused(adopt, capsys, changes, message):
    code, rows = adopt(results(*pair("norm", "forward", 1.0, 1.3)) | changes)
    assert code == 2 and rows == {} and message in capsys.readouterr().err
