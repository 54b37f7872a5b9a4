"""The picture of context parallelism: drawn from the code, and the one in docs/."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from megatron.tools import plot_context_parallel as tool

ROOT = Path(__file__).resolve().parents[3]


def test_every_visible_pair_of_chunks_is_computed_once():
    for ranks in (2, 4):
        found = tool.pairs(ranks)
        seen = [(query, key) for query, key, _, _ in found]
        assert seen == [(query, key) for query in range(2 * ranks) for key in range(query + 1)]
        assert {rank for *_, rank, _ in found} == {step for *_, step in found} == set(range(ranks))


def test_the_picture_of_the_docs(tmp_path):
    out = tmp_path / "picture.svg"
    assert tool.main(["--ranks", "4", "--out", str(out)]) == 0
    assert out.read_text() == (ROOT / "docs/images/context_parallel.svg").read_text()
    ElementTree.parse(out)
    assert "(images/context_parallel.svg)" in (ROOT / "docs/parallelism.md").read_text()
