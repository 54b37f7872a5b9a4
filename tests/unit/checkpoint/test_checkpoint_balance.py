"""Bytes of a checkpoint among the ranks of a pipeline stage: equal within 2%, whatever the layout,
in every rank's own plan and in the files.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from megatron.benchmarks.parallel_write import byte_count, imbalance, optimizers, written
from reshard_cases import start as start_run

from megatron.checkpoint.boxes import tiles
from megatron.checkpoint.manifest import MANIFEST, iteration_folder
from megatron.config.arguments import parse_arguments

MOST = 1.02  # of the fullest rank by the mean
BASE = """--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512
--micro-batch-size 1 --train-iters 1 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 50256 --lr 1e-3"""
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
--untie-embeddings-and-output-weights
    --group-query-attention --num-query-groups 2 --bf16"""
TP, PP, ZERO = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--zero-stage"
LAYOUTS = {  # name: (ranks, flags)
    **{f"dp{dp} zero0": (dp, "") for dp in (1, 3, 8, 16)},
    **{f"dp{dp} zero{1 + dp % 3}": (dp, f"{ZERO} {1 + dp % 3}") for dp in (7, 9)},
    **{
        f"tp{tp} dp{dp} zero{stage}": (tp * dp, f"{TP} {tp} {ZERO} {stage}")
        for tp, dp, stage in [(2, 8, 0), (2, 8, 2), (4, 3, 1), (4, 4, 3)]
    },
    **{
        f"tp{tp} dp{dp}, kv heads shared": (tp * dp, f"{TP} {tp} {LLAMA} {more}")
        for tp, dp, more in [(4, 5, f"{ZERO} 1")]
    },
    "hybrid shards": (16, f"{TP} 2 {ZERO} 3 --zero-shard-size 2"),
    "pp2": (16, f"{TP} 2 {PP} 2"),
    "pp2 zero1": (16, f"{TP} 2 {PP} 2 {ZERO} 1"),
    "pp2 dp first": (12, f"{PP} 2 --use-tp-pp-dp-mapping"),
}


def imbalances(name: str, mode: str) -> list[float]:
    """Of each pipeline stage, by what every rank of a layout would write: every element once."""
    ranks, flags = LAYOUTS[name]
    batch = ["--global-batch-size", str(ranks)]  # a multiple of every number of data-parallel ranks
    parsed = parse_arguments([*BASE.split(), *flags.split(), *batch])
    sizes: dict[int, list[int]] = {}
    boxes: dict[tuple, list] = {}
    for groups, optimizer in optimizers(parsed.config, ranks):
        pairs = written(optimizer, mode)
        sizes.setdefault(groups.pp.rank, []).append(byte_count(pairs))
        for box, _ in pairs:
            key = box.name, tuple(box.shape)
            boxes.setdefault(key, []).append((tuple(box.offset), tuple(box.extent)))
    assert all(tiles(shape, found) for (_, shape), found in boxes.items())
    return [imbalance(of_stage) for of_stage in sizes.values()]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_of_a_stage_plans_an_equal_part(name):
    assert max(imbalances(name, "balanced")) <= MOST


@pytest.mark.parametrize(
    ("name", "copies"), [("dp8 zero0", 8), ("tp2 dp8 zero0", 8), ("hybrid shards", 4), ("pp2", 4)]
)
def test_owners_alone_would_not(name, copies):
    """The control: without sharing, one of `copies` ranks writes what they all hold."""
    assert min(imbalances(name, "owner")) > 0.9 * copies


RUN = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16
--micro-batch-size 1 --global-batch-size 4 --train-iters 1 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 1023 --lr 1e-2 --eval-iters 0
    --position-embedding-type rope""".split()


def in_files(root: Path) -> dict[int, list[int]]:
    """Bytes of tensors of each rank's shard, from the headers of the files, by pipeline stage."""
    folder = root / iteration_folder(1)
    sizes: dict[int, list[int]] = {}
    for entry in json.loads((folder / MANIFEST).read_bytes())["manifest"]["shards"]:
        with open(folder / entry["file"], "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        stops = [value["data_offsets"][1] for key, value in header.items() if key != "__metadata__"]
        sizes.setdefault(entry["pp"], []).append(max(stops))
    return sizes


@pytest.mark.parametrize("layout", [f"{TP} 2", f"{PP} 2", f"{ZERO} 1"], ids=["tp2", "pp2", "zero1"])
def test_the_files_of_a_run_are_equal(gloo_world, tmp_path, layout):
    """And what they would be if owners alone wrote them."""
    for mode in ("balanced", "owner"):
        arguments = (
            *RUN,
            *layout.split(),
            "--save",
            str(tmp_path / mode),
            "--ckpt-parallel-write",
            mode,
        )
        said = gloo_world(4).run(start_run, arguments)
        assert all(text.endswith("exit code 0") for text in said), said
    balanced, owner = in_files(tmp_path / "balanced"), in_files(tmp_path / "owner")
    assert sum(map(len, balanced.values())) == 4 and all(
        imbalance(sizes) <= MOST for sizes in balanced.values()
    )
    assert {stage: sum(sizes) for stage, sizes in balanced.items()} == {
        stage: sum(sizes) for stage, sizes in owner.items()
    }
    shared = layout != f"{ZERO} 1"  # there every rank holds a slice of its own
    assert all(
        (max(sizes) > 1.5 * max(balanced[stage])) == shared for stage, sizes in owner.items()
    )
