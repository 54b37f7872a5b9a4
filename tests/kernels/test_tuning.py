"""The tool that tunes: what it tries, what wins, what it writes, and that it continues where it was
stopped.
"""

import json
import sys
from dataclasses import replace

import pytest
import torch
from megatron.kernels import cases, configurations, lang
from megatron.kernels.configurations import Row, find
from megatron.kernels.tools import manifest
from megatron.kernels.tools import tune as tool
from megatron.kernels.tools.shipped import Compiled

ABOUT = {"gpu": "H200", "torch": "2.11", "triton": "3.6.0", "tiny": False, "date": "2026-01-01"}


def test_the_fastest_wins_by_more_than_the_noise():
    frozen, other, third = (Row("op", 90, {}, {"M": size}) for size in (64, 128, 32))
    steady = [[1.0, 1.01, 0.99] * 8, [0.9, 0.91, 0.89] * 8, [2.0] * 24]
    assert tool.winner(frozen, [frozen, other, third], steady) == (other, 0.9, 1.0)
    # not 1%
    assert tool.winner(frozen, [frozen, other], [[1.0, 1.01, 0.99] * 8, [0.993] * 24])[0] is frozen
    # 10%, but noise of more
    noisy = [[1.0, 1.6, 0.4] * 3, [0.9, 1.5, 0.3] * 3]
    assert tool.winner(frozen, [frozen, other], noisy)[0] is frozen


def test_candidates_are_others_and_each_is_compiled_as_it_says():
    row = find("attention dq", 90, d=128, kind="causal")
    tried = tool.candidates(row, 90)
    assert len(tried) == 3 * 3 * 4 * 3 - 1
    assert all(each.numbers != row.numbers and each.measured == {} for each in tried)
    wanted = {"M": 64, "N": 32, "num_warps": 8, "num_stages": 4, "maxnreg": 128}
    odd = next(each for each in tried if each.numbers == wanted)
    shape = tool.compiled(odd, 90)[0]
    assert (shape.constants["M"], shape.constants["N"]) == (64, 32)
    assert (shape.num_warps, shape.num_stages) == (8, 4) and shape.options == {"maxnreg": 128}
    assert find("attention dq", 90, d=128, kind="causal") is row  # as before
    moved = tool.candidates(find("norm backward", 90, kind="whole", bytes=2), 90)
    others = {(1024, 16, 2112, 3), (2048, 8, 2112, 3), (2048, 16, 4224, 3), (2048, 16, 2112, 6)}
    assert {tuple(each.numbers.values()) for each in moved} >= others
    for facts, blocks in (((128, 98592, 8, 90), 2), ((129, 0, 8, 90), 1), ((64, 98592, 4, 80), 1)):
        *numbers, arch = facts
        named = dict(zip(("registers", "shared", "num_warps"), numbers, strict=True))
        assert tool.blocks_of_an_sm(named, arch) == blocks


def test_what_won_is_written_and_nothing_else():
    table = [
        Row("a", 80, {"d": 1}, {"M": 1}),
        Row("a", 90, {"d": 2}, {"M": 2}),
        Row("attention dq", 90, {"d": 3}, {"M": 3}, spills=8, shared=9),
    ]
    line = {"key": {"d": 1}, "arch": 90, "frozen": {"M": 1}, "ms": 1.0, "spills": 0, "shared": 7}
    line |= {"fault": "", **ABOUT}
    third = {"operator": "attention dq", "key": {"d": 3}, "numbers": {"M": 5}, "fault": "off by 1"}
    lines = [
        # beats the row of an older architecture: its own row
        line | {"operator": "a", "numbers": {"M": 4}},
        # the frozen one won: now it is measured
        line | {"operator": "a", "key": {"d": 2}, "frozen": {"M": 2}, "numbers": {"M": 2}},
        line | third,
    ]
    measured = {name: (line | ABOUT)[name] for name in ("ms", "gpu", "torch", "triton", "date")}
    assert tool.taken(table, lines) == [
        table[0],
        replace(table[1], measured=measured),
        Row("a", 90, {"d": 1}, {"M": 4}, measured=measured),
        table[2],
    ]
    unused = [lines[0] | {"tiny": True}, lines[0] | {"numbers": {"M": 1}}]
    assert tool.taken(table, unused) == table


def test_a_wrong_result_is_named():
    good = cases.Case(lambda: (torch.ones(4),), lambda _: (torch.ones(4),))
    assert cases.wrong(good) == ""
    for value, fault in ((1.1, "off by 0.1 of the norm"), (torch.nan, "nan")):
        made = torch.full((4,), value)
        assert fault in cases.wrong(replace(good, call=lambda made=made: (made,)))
    row = find("norm backward", 90, kind="wide")
    with (
        pytest.raises(ZeroDivisionError),
        tool.using(replace(row, numbers=row.numbers | {"block": 64})),
    ):
        assert find("norm backward", 90, kind="wide").numbers["block"] == 64
        raise ZeroDivisionError
    assert find("norm backward", 90, kind="wide") is row


@pytest.mark.full
def test_it_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    def call(*arguments: str) -> str:
        words = ["tune.py", "--tiny", "--out", str(tmp_path / "tuned.jsonl"), *arguments]
        monkeypatch.setattr(sys, "argv", words)
        assert tool.main() == 0
        return capsys.readouterr().out.splitlines()[-1]

    left = call("--only", "norm backward", "--minutes", "0")
    assert left == "0 rows measured, 4 left: the same call continues with them"
    assert call("--only", "norm backward wide") == "1 rows measured, 0 left"
    before, table = (tmp_path / "tuned.jsonl").read_text(), configurations.FILE.read_text()
    line = json.loads(before)
    assert line["tried"] == 2 and line["ms"] > 0 and line["fault"] == "" and line["tiny"]
    assert call("--only", "norm backward wide", "--write") == "1 rows measured, 0 left"
    assert (tmp_path / "tuned.jsonl").read_text() == before
    assert configurations.FILE.read_text() == table  # tiny results are not written


@pytest.mark.full
def test_compiled_candidates_and_what_they_need():
    row = find("dropout", 80)
    wide = replace(row, numbers={"block": 4096, "per_thread": 128})
    (facts, faults), (other, _) = tool.gate([row, wide], 80, 1, whole=False)
    assert faults == [] and facts["registers"] < other["registers"] and facts["spilled"] == 0
    assert tool.show(row, facts, ["why"], 80).startswith(
        f"| dropout | block 2048, per_thread 16 | {facts['registers']} | 0 | 0 | "
    )


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_the_case_of_a_row_launches_it(arch, monkeypatch):
    """What is timed and compared is the row that is written."""
    monkeypatch.setattr(lang, "ARCH_WITHOUT_GPU", arch)
    launched: list = []
    for row in tool.rows_of(arch):
        case = cases.case(row, torch.device("meta"), True)
        launched.clear()
        with lang.launches_to(lambda kernel, grid, by, *_, **__: launched.append(by)):
            case.call()
        assert any(getattr(each, "row", each) is row for each in launched), tool.title(row)


@pytest.mark.parametrize(
    "arch, found, fault",
    [
        (80, {"old_mma": 8, "cp_async": 4}, ""),
        (80, {"old_mma": 8, "cp_async": 0}, "no asynchronous copies"),
        (89, {"old_mma": 8, "cp_async": 4}, ""),
        (89, {"old_mma": 0, "cp_async": 4}, "0 HMMA"),
        (90, {"old_mma": 2, "wgmma": 4}, "4 wgmma and 2 older"),
        (103, {"old_mma": 0, "tcgen05": 4}, ""),
        (120, {"old_mma": 8}, ""),
    ],
)
def test_the_rules_of_every_gpu(arch, found, fault):
    shape = Compiled("a", None, {}, {}, arch=arch, matmul=True)
    broken = manifest.faults(shape, {"spilled": 0, "shared": 0, **found})
    assert [each.startswith(fault) for each in broken] == [True] * bool(fault)


def test_rows_that_a_gpu_has_no_memory_for_are_not_tuned():
    def sizes(arch: int) -> set[int]:
        return {row.key["d"] for row in tool.rows_of(arch, "attention dq")}

    assert sizes(90) == {64, 128, 256} and 256 not in sizes(89)
