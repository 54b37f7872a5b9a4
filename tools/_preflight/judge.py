"""Which nodes are slow or wrong, from what all ranks have found; and the report.

A measurement is an outlier when it is more than TOLERANCE and more than one standard deviation
below the others. Median and median absolute deviation stand for mean and standard deviation, which
one slow node of three or four itself moves so far that it is hardly more than one deviation off.
Called from tools/preflight.py.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.tools._preflight.links import Speed
from megatron.tools._preflight.meeting import Findings
from megatron.tools._preflight.probes import MISSING, Facts, Needs

from megatron.config.errors import some
from megatron.distributed.rendezvous import name_ranks

TOLERANCE = 0.1
CLOCK = 2.0  # seconds
DEVIATION = 1.4826  # of a normal distribution, over its median absolute deviation
SHOWN = 16  # most nodes that the table lists
NAMED = 8  # most values of a kind that a message lists
UNITS = {"GEMM": "TFLOP/s", "copy": "GB/s", "disk": "GB/s", "network": "GB/s"}
FIXES = {
    "GEMM": "look for other programs on it, its clock limits and its temperature",
    "copy": "look for other programs on it, and its memory's error counters",
    "disk": "look at its mount of the file system and at its storage network",
    "network": "look at its adapters, cables and switch ports",
}


@dataclass(frozen=True)
class Limits:
    """What is right: see the flags of tools/preflight.py."""

    tolerance: float = TOLERANCE
    clock: float = CLOCK
    expected: Mapping[str, float] = field(default_factory=dict)  # by kind, in UNITS


@dataclass(frozen=True)
class Fault:
    """What is wrong, and the node without which it would not be; None: every node has it, or it
    cannot be said which.
    """

    text: str
    node: str | None = None


def judge(findings: Findings, needs: Needs, limits: Limits, hosts: Sequence[str]) -> list[Fault]:
    """Every fault. `hosts` are those on which the launcher has placed the ranks, where known."""
    return [
        *missing_ranks(findings, hosts),
        *folders(findings),
        *files(findings, needs),
        *save_folder(findings, needs),
        *versions(findings),
        *clocks(findings, limits),
        *speeds(findings, limits),
        *network(findings, limits),
        *axes(findings, limits),
    ]


def leave_out(faults: list[Fault]) -> list[str]:
    """The nodes that are named, each once."""
    return list(dict.fromkeys(fault.node for fault in faults if fault.node))


def missing_ranks(findings: Findings, hosts: Sequence[str]) -> list[Fault]:
    """Ranks that have not answered, by node. One that never came is where the launcher placed it,
    else where its neighbours are.
    """
    found: dict[tuple[str | None, str], list[int]] = {}
    for rank, how in findings.missing.items():
        node = findings.nodes.get(rank) or (hosts[rank] if rank < len(hosts) else None)
        found.setdefault((node, how), []).append(rank)
    return [
        Fault(
            f"{node or 'an unknown node'}: {name_ranks(ranks)} {how}: look whether its process "
            "runs, and whether its network reaches rank 0",
            node,
        )
        for (node, how), ranks in found.items()
    ]


def folders(findings: Findings) -> list[Fault]:
    """What ranks could not do."""
    found: dict[str, dict[str, str]] = {}
    for node, facts in _by_node(findings):
        for about, problem in facts.problems.items():
            subject = "" if about in ("device", "error", "time") else f"{about}: "
            found.setdefault(about, {})[node] = f"{subject}{problem}"
    return [fault for by_node in found.values() for fault in _faults_of(by_node, findings)]


def _faults_of(by_node: Mapping[str, str], findings: Findings) -> list[Fault]:
    """The problems of nodes; one that every node has is no node's fault."""
    if by_node and len(by_node) == len(findings.ranks_by_node()):
        first = next(iter(by_node.values()))
        return [Fault(f"every node: {first}")]
    return [Fault(f"{node}: {text}", node) for node, text in by_node.items()]


def files(findings: Findings, needs: Needs) -> list[Fault]:
    """Files that are not everywhere, or of other sizes."""
    sizes: dict[str, dict[str, str]] = {}
    for node, facts in _by_node(findings):
        for path, size in facts.files.items():
            text = "cannot be read" if size == MISSING else f"has {size} bytes"
            sizes.setdefault(path, {})[node] = text
    faults = []
    for path, by_node in sizes.items():
        if path in needs.files and set(by_node.values()) == {"cannot be read"}:
            faults.append(Fault(f"every node: {path} cannot be read: correct its name or rights"))
            continue
        faults += _odd_ones(
            by_node, path, "copy it again, or mount the same file system on every node"
        )
    return faults


def save_folder(findings: Findings, needs: Needs) -> list[Fault]:
    """Nodes whose --save is another folder than that of most, and disks that a checkpoint does not
    fit onto.
    """
    seen = {
        node: f"holds the files of ranks {facts.seen}"
        for node, facts in _by_node(findings)
        if facts.seen
    }
    free = {
        node: facts.free
        for node, facts in _by_node(findings)
        if facts.free is not None and facts.free < needs.save_bytes
    }
    short = {
        node: f"--save {needs.save} has room for {free[node] / 1e9:.3g} GB, and a checkpoint takes "
        f"{needs.save_bytes / 1e9:.3g}: free space, or choose another folder"
        for node in sorted(free, key=free.__getitem__)  # the smallest represents them all
    }
    odd = _odd_ones(seen, f"--save {needs.save}", "mount one file system on every node")
    return [*odd, *_faults_of(short, findings)]


def versions(findings: Findings) -> list[Fault]:
    """Nodes whose software, settings or devices are not those of most."""
    found: dict[str, dict[str, set[str]]] = {}
    for node, facts in _by_node(findings):
        for name, version in facts.versions.items():
            found.setdefault(name, {}).setdefault(node, set()).add(version)
    faults = []
    for name, by_node in found.items():
        joined = {node: " and ".join(sorted(values)) for node, values in by_node.items()}
        faults += _odd_ones(joined, name, "start every node with the same software and flags")
    return faults


def _odd_ones(by_node: Mapping[str, str], what: str, fix: str) -> list[Fault]:
    """Nodes that differ from most of them."""
    counts = Counter(by_node.values())
    if len(counts) < 2:
        return []
    common, count = counts.most_common(1)[0]
    if 2 * count <= len(by_node):
        shown = some([f"{node}: {value}" for node, value in by_node.items()], NAMED)
        return [Fault(f"the nodes differ in {what}, and none has most of them ({shown}): {fix}")]
    return [
        Fault(f"{node}: {what}: {value}; the others: {common}; {fix}", node)
        for node, value in by_node.items()
        if value != common
    ]


def clocks(findings: Findings, limits: Limits) -> list[Fault]:
    """Nodes whose clocks are off those of most."""
    ahead: dict[str, float] = {}
    for node, facts in _by_node(findings):
        ahead.setdefault(node, facts.clock)
    if not ahead:
        return []
    middle = statistics.median_low(ahead.values())  # rank 0's own may be the wrong one
    off = {node: seconds - middle for node, seconds in ahead.items()}
    wrong = {node: seconds for node, seconds in off.items() if abs(seconds) > limits.clock}
    if wrong and len(ahead) == 2:
        first, second = ahead
        apart = abs(ahead[first] - ahead[second])
        return [
            Fault(
                f"the clocks of {first} and {second} are {apart:.1f} s apart: let both be set by "
                "the same time server"
            )
        ]
    return [
        Fault(
            f"{node}: its clock is {abs(seconds):.1f} s {'ahead' if seconds > 0 else 'behind'}: "
            "let chrony or ntpd set it",
            node,
        )
        for node, seconds in wrong.items()
    ]


def outliers(values: Mapping[str, float], tolerance: float) -> dict[str, float]:
    """Those that are slow, and what is usual."""
    if not values:
        return {}
    usual = statistics.median(values.values())
    deviation = DEVIATION * statistics.median(abs(value - usual) for value in values.values())
    least = usual - max(deviation, tolerance * usual)
    return {name: usual for name, value in values.items() if value < least}


def _slow(kind: str, values: Mapping[str, float], limits: Limits) -> dict[str, str]:
    """Why each slow one is slow. A disk, which nodes share and others use, is held to what is
    expected alone.
    """
    unit = UNITS[kind]
    expected = limits.expected.get(kind)
    among = {} if kind == "disk" else outliers(values, limits.tolerance)
    found = {
        name: f"{values[name]:.3g} {unit}, the others {usual:.3g}" for name, usual in among.items()
    }
    if expected is not None:
        for name, value in values.items():
            if value < (1 - limits.tolerance) * expected:
                found.setdefault(name, f"{value:.3g} {unit}, expected {expected:g}")
    return found


def speeds(findings: Findings, limits: Limits) -> list[Fault]:
    """Devices that compute or copy slowly, and nodes that write slowly."""
    faults = []
    for kind in ("GEMM", "copy", "disk"):
        values = {
            str(rank): facts.speeds[kind]
            for rank, facts in findings.facts.items()
            if kind in facts.speeds
        }
        for name, why in _slow(kind, values, limits).items():
            node, rank = findings.nodes[int(name)], int(name)
            device = "" if kind == "disk" else f" of rank {rank} ({findings.facts[rank].device})"
            faults.append(Fault(f"{node}: {kind}{device} is slow: {why}; {FIXES[kind]}", node))
    return faults


def best_links(findings: Findings) -> dict[str, float]:
    """GB/s of each node with its fastest partner: it is slow only if it is so with all."""
    names = list(findings.ranks_by_node())
    best: dict[str, float] = {}
    for pair, speed in findings.pairs.items():
        for node in pair:
            best[names[node]] = max(speed, best.get(names[node], 0.0))
    return best


def network(findings: Findings, limits: Limits) -> list[Fault]:
    """Nodes that are slow with every partner; of two nodes it cannot be said which is."""
    best = best_links(findings)
    slow = _slow("network", best, limits)
    if len(best) == 2 and (slow or 0.0 in best.values()):
        why = next(iter(slow.values()), "no message went through")
        return [Fault(f"between {' and '.join(best)}: {why}; {FIXES['network']} of both")]
    faults = []
    for node, why in slow.items():
        why = why if best[node] else "no message to or from it went through"
        faults.append(
            Fault(f"{node}: network is slow with every partner: {why}; {FIXES['network']}", node)
        )
    names = list(findings.ranks_by_node())
    for pair, speed in findings.pairs.items():
        if speed == 0.0 and not any(best[names[node]] == 0.0 for node in pair):
            first, second = (names[node] for node in pair)
            faults.append(
                Fault(
                    f"between {first} and {second} no message went through, although each "
                    "reaches other nodes: look at the switches between them"
                )
            )
    return faults


def axes(findings: Findings, limits: Limits) -> list[Fault]:
    """Groups of an axis that did not work; and those that are slow and lie on one node."""
    faults = []
    waited: dict[str, list[int]] = {}
    for rank, error in findings.errors.items():
        waited.setdefault(error, []).append(rank)
    for error, ranks in waited.items():
        faults.append(
            Fault(f"{name_ranks(ranks)} {error}, although every pair of nodes exchanges messages")
        )
    for (axis, operation, _), groups in _largest(findings).items():
        values = {str(ranks): speed for ranks, speed in groups.items()}
        slow = outliers(values, limits.tolerance)
        for group, speed in groups.items():
            nodes = {findings.nodes[rank] for rank in group}
            if str(group) in slow and len(nodes) == 1:
                node = nodes.pop()
                faults.append(
                    Fault(
                        f"{node}: {operation} over {axis} is slow in {name_ranks(list(group))}: "
                        f"{speed:.3g} GB/s, the others {slow[str(group)]:.3g}; look at the links "
                        "within the node",
                        node,
                    )
                )
    return faults


def _largest(findings: Findings) -> dict[tuple[str, str, int], dict[tuple[int, ...], float]]:
    """GB/s of each group with the largest message: that of its slowest rank."""
    sizes: dict[tuple[str, str], int] = {}
    for one in findings.axes:
        key = one.axis, one.operation
        sizes[key] = max(one.size, sizes.get(key, 0))
    return {
        (axis, operation, size): _groups(findings.axes, axis, operation, size)
        for (axis, operation), size in sizes.items()
    }


def _groups(
    found: list[Speed], axis: str, operation: str, size: int
) -> dict[tuple[int, ...], float]:
    groups: dict[tuple[int, ...], float] = {}
    for one in found:
        if (one.axis, one.operation, one.size) == (axis, operation, size):
            groups[one.ranks] = min(one.speed, groups.get(one.ranks, one.speed))
    return groups


def _by_node(findings: Findings) -> list[tuple[str, Facts]]:
    return [(findings.nodes[rank], findings.facts[rank]) for rank in sorted(findings.facts)]


def report(findings: Findings, faults: list[Fault], title: str) -> list[str]:
    """What a person reads, and a last line that a script reads."""
    lines = [title, *table(findings, leave_out(faults))]
    lines += [f"fault: {fault.text}" for fault in faults]
    return [*lines, verdict(faults)]


def verdict(faults: list[Fault]) -> str:
    """The last line."""
    named = leave_out(faults)
    if named:
        return f"preflight: leave out {','.join(named)}"
    return "preflight: not in order" if faults else "preflight: in order"


def node_speeds(findings: Findings) -> dict[str, dict[str, float]]:
    """Of each node the slowest of its devices, its disk and its network, and its clock."""
    found: dict[str, dict[str, float]] = {node: {} for node in findings.ranks_by_node()}
    for node, facts in _by_node(findings):
        for kind, speed in facts.speeds.items():
            found[node][kind] = min(speed, found[node].get(kind, speed))
        found[node].setdefault("clock", facts.clock)
    for node, speed in best_links(findings).items():
        found[node]["network"] = speed
    return found


def table(findings: Findings, named: list[str]) -> list[str]:
    """A line for each node, of many for those that are named, and one for the median; then one for
    each operation and size of an axis.
    """
    nodes = node_speeds(findings)
    kinds = [*UNITS, "clock"]
    heads = [f"{kind} {UNITS.get(kind, 's')}" for kind in kinds]
    shown = list(nodes) if len(nodes) <= SHOWN else [node for node in nodes if node in named]
    rows = [[node, *[_cell(nodes[node].get(kind)) for kind in kinds]] for node in shown]
    middle = [[values[kind] for values in nodes.values() if kind in values] for kind in kinds]
    rows.append(["median", *[_cell(statistics.median(m) if m else None) for m in middle]])
    wide = max(len(row[0]) for row in rows)
    lines = ["  ".join([" " * wide, *heads])]
    for row in rows:
        cells = [cell.rjust(len(head)) for cell, head in zip(row[1:], heads)]
        lines.append("  ".join([row[0].ljust(wide), *cells]))
    return [*lines, *_axis_lines(findings)]


def _axis_lines(findings: Findings) -> list[str]:
    """A line for each operation and size of an axis."""
    lines = []
    kinds_of_axes = sorted({(one.axis, one.operation, one.size) for one in findings.axes})
    for axis, operation, size in kinds_of_axes:
        speeds_of = sorted(_groups(findings.axes, axis, operation, size).values())
        lines.append(
            f"{axis} {operation} of {size / 2**20:g} MiB: GB/s of the slowest, median and fastest "
            f"of {len(speeds_of)} groups: {speeds_of[0]:.3g}, "
            f"{statistics.median(speeds_of):.3g}, {speeds_of[-1]:.3g}"
        )
    return lines


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
