"""Which nodes a preflight names, from what ranks have found; and who is paired with whom."""

from __future__ import annotations

import dataclasses

import pytest
from megatron.tools._preflight.judge import Limits, judge, leave_out, outliers, report
from megatron.tools._preflight.links import pairings
from megatron.tools._preflight.meeting import Findings
from megatron.tools._preflight.probes import MISSING, Facts, Needs

from megatron.config.errors import UserError
from tools import preflight

NEEDS = Needs(("data.bin",), ("tracker",), ("/cache",), "/run", 1e9, "settings", ())
FACTS = Facts(
    device="CPU",
    backend="gloo",
    files={"data.bin": 100, "tracker": MISSING},
    versions={"torch": "2.13"},
    speeds={"GEMM": 1.0, "copy": 10.0, "disk": 1.0},
    seen="0, 2, 4, 6",
    free=2e9,
)


def findings(nodes: int = 4, **changed: object) -> Findings:
    """Nodes n0, n1, ... of two ranks each, all in order but n1, whose first rank's facts are
    `changed`.
    """
    found = Findings(2 * nodes, {rank: f"n{rank // 2}" for rank in range(2 * nodes)})
    found.facts = {rank: dataclasses.replace(FACTS) for rank in range(2 * nodes)}
    for rank in range(1, 2 * nodes, 2):  # one rank of a node looks at files and folders
        found.facts[rank] = dataclasses.replace(FACTS, files={}, free=None, seen="")
    if changed:
        found.facts[2] = dataclasses.replace(FACTS, **changed)
    pairs = [pair for one in pairings(nodes) for pair in one]
    found.pairs = dict.fromkeys(pairs, 40.0)
    return found


def faults(found: Findings, limits: Limits = Limits(), hosts: tuple[str, ...] = ()) -> list:
    return judge(found, NEEDS, limits, hosts)


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_nodes_in_order(nodes):
    found = findings(nodes)
    assert faults(found) == []
    assert report(found, [], "title")[-1] == "preflight: in order"


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"files": {"data.bin": 99, "tracker": MISSING}}, "data.bin: has 99 bytes; the others: "),
        ({"files": {"data.bin": MISSING, "tracker": MISSING}}, "data.bin: cannot be read"),
        ({"versions": {"torch": "2.12"}}, "torch: 2.12 and 2.13; the others: 2.13"),
        ({"clock": 120.0}, "its clock is 120.0 s ahead"),
        ({"problems": {"/cache": "is full"}}, "/cache: is full"),
        ({"seen": "2"}, "--save /run: holds the files of ranks 2; the others: "),
        ({"free": 1e8}, "--save /run has room for 0.1 GB, and a checkpoint takes 1"),
        ({"speeds": {"GEMM": 0.85, "copy": 10.0}}, "GEMM of rank 2 (CPU) is slow: 0.85 TFLOP/s"),
    ],
)
def test_the_node_that_is_wrong_is_named(changed, text):
    found = faults(findings(**changed))
    assert [fault.node for fault in found] == ["n1"], found
    assert found[0].text.startswith(f"n1: {text}"), found
    assert leave_out(found) == ["n1"]


def test_what_all_nodes_have_or_two_differ_in_names_none():
    """Leaving a node out would not fix it."""
    everywhere = findings()
    for rank in range(0, 8, 2):
        everywhere.facts[rank] = dataclasses.replace(
            FACTS, files={"data.bin": MISSING}, problems={"/run": "is full"}, free=8e8 - rank * 1e8
        )
    found = faults(everywhere)
    assert [fault.node for fault in found] == [None] * 3
    assert all(fault.text.startswith("every node: ") for fault in found)
    assert "has room for 0.2 GB" in found[-1].text  # the smallest
    assert report(everywhere, found, "title")[-1] == "preflight: not in order"
    for changed in ({"versions": {"torch": "2.12"}}, {"clock": 120.0}, {"seen": "2"}):
        assert [fault.node for fault in faults(findings(2, **changed))] == [None]


def test_the_rule_of_outliers():
    """Ten per cent and one deviation; the slow one does not hide itself."""
    assert outliers({"a": 1.0, "b": 1.0, "c": 0.89}, 0.1) == {"c": 1.0}
    assert outliers({"a": 1.0, "b": 1.0, "c": 0.91}, 0.1) == {}
    assert outliers({"a": 1.0, "b": 0.01}, 0.1) == {}  # of two neither is known
    spread = {str(i): 1.0 + 0.1 * i for i in range(-5, 6)}  # a deviation of 0.44
    assert outliers(spread, 0.1).keys() == {"-5"}
    assert outliers({**spread, "slow": 0.2}, 0.1).keys() >= {"slow"}


def test_a_slow_node_is_told_from_its_partners():
    found = findings()
    for pair in found.pairs:
        if 3 in pair:
            found.pairs[pair] = 20.0
    assert [fault.node for fault in faults(found)] == ["n3"]
    for pair in found.pairs:
        if 3 in pair:
            found.pairs[pair] = 0.0
    assert "no message to or from it went through" in faults(found)[0].text
    found = findings()
    found.pairs[0, 1] = 0.0  # both reach the others
    assert [fault.node for fault in faults(found)] == [None]


def test_a_missing_rank_is_where_the_launcher_says():
    found = findings()
    del found.nodes[3], found.facts[2], found.facts[3]
    found.missing = {2: "fell silent", 3: "did not arrive"}
    hosts = tuple(f"n{rank // 2}" for rank in range(8))
    first, second = faults(found, hosts=hosts)
    assert first.text.startswith("n1: rank 2 fell silent") and second.node == "n1"
    assert [fault.node for fault in faults(found)] == ["n1", None]


def test_the_flags_of_the_tool_leave_the_rest_to_the_run():
    own, rest = preflight.read_own(
        ["--lr", "1", "--timeout", "3", "--expect-disk=2", "--node", "a"]
    )
    assert rest == ["--lr", "1"] and (own.timeout, own.expect_disk, own.node) == (3.0, 2.0, "a")
    with pytest.raises(UserError, match="--timeout: 0 is no number above 0"):
        preflight.read_own(["--timeout", "0"])
