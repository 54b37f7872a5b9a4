"""What the machine code of a compiled kernel does, read from the listing that `nvdisasm -c` prints:
its loops, and matrix products that wait for each other.

A loop is what can come back to a block of instructions that every way into it passes. The compiler
puts the second try of a wait behind the end of the program, from where it jumps back into the
middle of a loop: by addresses alone that would look like a loop, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import networkx  # torch depends on it

LABEL = re.compile(r"^(\.L_\w+):")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]+)([^;]*);?")
PRODUCT = r"(HGMMA|HMMA|UTC\w*MMA)"
MEMORY = r"(LDG|STG|RED|ATOM|UTMA)"
# what is counted in the loop that does most of the work
IN_HOT_LOOP = {
    "hot_instructions": r"",
    "hot_cp_async": r"LDGSTS",
    "hot_barriers": r"BAR\.",
    "hot_spill_loads": r"LDL",
}


@dataclass
class BasicBlock:
    """Instructions that run one after another, as (name, operands), and the blocks that may come
    next.
    """

    instructions: list[tuple[str, str]] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)  # labels that are jumped to
    falls: bool = True  # whether the next block of the listing may come next

    def has(self, pattern: str) -> bool:
        """Whether one of its instructions begins so."""
        return any(re.match(pattern, name) for name, _ in self.instructions)


def blocks(code: str) -> tuple[list[BasicBlock], dict[int, list[int]]]:
    """(the blocks of a listing in order, for each the blocks that may come next)."""
    found, labels = [BasicBlock()], {}
    for line in code.splitlines():
        if label := LABEL.match(line):
            if found[-1].instructions:
                found.append(BasicBlock())
            labels[label[1]] = len(found) - 1
        elif instruction := INSTRUCTION.match(line):
            condition, name, operands = instruction.groups()
            found[-1].instructions.append((name, operands.strip()))
            kind = name.split(".")[0]
            if kind in ("BRA", "BRX", "JMP", "EXIT", "RET"):
                found[-1].targets = re.findall(r"\.L_\w+", operands)
                # a branch has further conditions before its label
                further = kind == "BRA" and not operands.strip().startswith("`")
                found[-1].falls = bool(condition) or further
                found.append(BasicBlock())
    following = {
        at: [labels[label] for label in block.targets if label in labels]
        + ([at + 1] if block.falls and at + 1 < len(found) else [])
        for at, block in enumerate(found)
    }
    return found, following


def loops(following: dict[int, list[int]]) -> list[set[int]]:
    """The loops among blocks of which 0 is the first: each the set of its blocks."""
    graph = networkx.DiGraph(following)
    graph = graph.subgraph(networkx.descendants(graph, 0) | {0})
    passed = networkx.immediate_dominators(graph, 0)
    found: dict[int, set[int]] = {}
    for last, head in graph.edges:
        # a way back: every way from the first block to `last` passes `head`
        at = last
        while at not in (head, passed.get(at, at)):
            at = passed[at]
        if at == head:
            within = graph.subgraph(graph.nodes - {head})
            ways = networkx.ancestors(within, last) if last != head else set()
            found.setdefault(head, {head}).update(ways | {last})
    return list(found.values())


def hot_loop(code: str) -> list[str]:
    """The names of the instructions of the loop that does most of the work; none without a loop.

    Of loops with matrix products and none such within: the shortest, since loops over edges do what
    the one over whole blocks does, and mask. Else the longest of those that go to memory.
    """
    found, following = blocks(code)
    every = loops(following)
    for work, choose in ((PRODUCT, min), (MEMORY, max)):
        working = [body for body in every if any(found[at].has(work) for at in body)]
        inner = [body for body in working if not any(other < body for other in working)]
        if inner:
            bodies = [_instructions(found, body, every) for body in inner]
            return choose(bodies, key=len)
    return []


def _instructions(found: list[BasicBlock], body: set[int], every: list[set[int]]) -> list[str]:
    """Of a loop, without the loops that only wait within it and the jumps back from them."""
    waits = set().union(*(other for other in every if other < body))
    return [
        name
        for at in sorted(body - waits)
        if found[at].falls or len(found[at].instructions) > 1
        for name, _ in found[at].instructions
    ]


def serialised(code: str) -> int:
    """How many wgmma are waited for before the next one of their own sum begins.

    The tensor cores take the products of one sum one after another without a wait between. Where
    registers are short the compiler waits after each one (its warnings C7510 and following).
    """
    count = 0
    for block in blocks(code)[0]:
        waited: set[str] = set()  # sums that a wait came after
        begun: set[str] = set()
        for name, operands in block.instructions:
            if name.startswith("HGMMA"):
                total, *rest = (part.strip() for part in operands.split(","))
                count += total in waited and total in rest
                begun.add(total)
                waited.discard(total)
            elif name.startswith("WARPGROUP.DEPBAR") and operands.endswith("0x0"):
                waited |= begun
    return count


def overlapped(code: str) -> int:
    """How many exponentials stand between a wgmma and the wait for all of them."""
    count, under_way = 0, False
    for block in blocks(code)[0]:
        for name, operands in block.instructions:
            if name.startswith("HGMMA"):
                under_way = True
            elif name.startswith("WARPGROUP.DEPBAR") and operands.endswith("0x0"):
                under_way = False
            elif name == "MUFU.EX2":
                count += under_way
    return count


def unguarded(code: str) -> int:
    """How many arrivals at an mbarrier can follow a wait for wgmma without a barrier of threads
    between them: one thread signals that a buffer has been read, and other warps may still read it.
    """
    found, following = blocks(code)
    waited = [False] * len(found)  # whether a wait without a barrier since may come before a block
    left = list(range(len(found)))
    while left:
        at = left.pop()
        after, _ = _arrivals(found[at], waited[at])
        for each in following[at]:
            if after and not waited[each]:
                waited[each] = True
                left.append(each)
    return sum(_arrivals(block, before)[1] for block, before in zip(found, waited, strict=True))


def _arrivals(block: BasicBlock, waited: bool) -> tuple[bool, int]:
    """(Whether a wait for wgmma without a barrier since comes before the block's end, arrivals
    after such a wait), from whether one comes before its beginning.
    """
    count = 0
    for name, _ in block.instructions:
        if name.startswith("WARPGROUP.DEPBAR"):
            waited = True
        elif name.startswith("BAR.SYNC"):
            waited = False
        elif name.startswith("SYNCS.ARRIVE"):
            count += waited
    return waited, count


def facts(code: str) -> dict[str, int]:
    """What the manifest holds of a listing."""
    hot = hot_loop(code)
    counts = {name: count(pattern, hot) for name, pattern in IN_HOT_LOOP.items()}
    return {"serialised": serialised(code)} | counts


def count(pattern: str, instructions: list[str]) -> int:
    """How many of the instructions begin so."""
    return sum(re.match(pattern, each) is not None for each in instructions)
