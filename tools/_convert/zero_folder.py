"""DeepSpeed's ZeRO folders: the fp32 master weights of stages 1, 2 and 3, put together where they
lie.

Facts of DeepSpeed (0.9 to 0.19): every rank writes
`[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt` (D data-parallel, MM model-parallel), whose
`optimizer_state_dict` holds its partitions. `param_shapes` of the model-states file gives names and
shapes in the order in which parameters were flattened, one dictionary for each of the optimizer's
groups; buffers are in its `module`, by `buffer_names`. Stages 1 and 2 lay a group's parameters end
to end and give each rank a range of that; stage 3 gives each rank an equal part of every parameter,
the last one padded. What BF16_Optimizer writes (stage 1 with fp32 accumulation) lies as at stage 1
and names no stage.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.tools._convert.huggingface_rules import EXPERT_BIAS
from megatron.tools._convert.models import Held, Part, box_part, whole_part
from megatron.tools._convert.pickles import Record, read_torch_file
from torch import Tensor

from megatron.checkpoint.boxes import Dims
from megatron.checkpoint.manifest import CheckpointError

Paths = dict[int, Path]  # by rank
State = dict[str, Any]  # what a file holds
Partition = tuple[Path, State]
OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


def find_folder(folder: Path) -> Path:
    """The folder itself when it holds partitions, else the one that its file `latest` names. Raises
    CheckpointError.
    """
    latest = folder / "latest"
    if not any(folder.glob("*_optim_states.pt")) and latest.is_file():
        tag = latest.read_bytes()[:4096].decode(errors="replace").strip()
        if Path(tag).name != tag:
            raise CheckpointError(f"{latest}: {tag!r} is not the name of a folder")
        folder = folder / tag
    if not any(folder.glob("*_optim_states.pt")):
        raise CheckpointError(
            f"{folder}: no *_optim_states.pt there: give a folder with ZeRO's partitions, or "
            "one with DeepSpeed's `latest`"
        )
    return folder


class ZeroFolder:
    """The files of a folder, opened: `.ranks`, what each model-parallel rank holds: {name: (shape,
    parts)}; `.states`, the rest of each rank's model-states file. Raises CheckpointError when
    partitions are missing or do not belong together.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks: list[Held] = []
        self.states: list[State] = []
        for rank, paths in sorted(_find_partitions(folder).items()):
            stage, partitions = _open_partitions(paths)
            prefix = "zero_pp_rank_0_" if stage == 3 else ""
            path = folder / f"{prefix}mp_rank_{rank:02d}_model_states.pt"
            state = _read(path)
            self.ranks.append(_tensors(state, path, stage, partitions))
            self.states.append(state)


def _find_partitions(folder: Path) -> dict[int, Paths]:
    """Model-parallel rank -> data-parallel rank -> its file. Raises CheckpointError."""
    found: dict[int, Paths] = {}
    for path in sorted(folder.glob("*_optim_states.pt")):
        match = OPTIMIZER_FILE.fullmatch(path.name)
        if match is None:
            raise CheckpointError(
                f"{path}: not a partition of ZeRO (experts have no counterpart here)"
            )
        other = found.setdefault(int(match[2]), {}).setdefault(int(match[1]), path)
        if other != path:
            raise CheckpointError(
                f"{path}: {other.name} is of the same rank: files of two saves lie in "
                "one folder; remove those of the other"
            )
    if sorted(found) != list(range(len(found))):
        ranks = ", ".join(map(str, sorted(found)))
        raise CheckpointError(
            f"{folder}: partitions of model-parallel ranks {ranks} alone: bring all "
            "files of the save into the folder"
        )
    return found


def _tensors(state: State, path: Path, stage: int, partitions: list[Partition]) -> Held:
    """The parameters of one model-parallel rank, shared ones under each of their names, and the
    bias of experts, which is a buffer.
    """
    merge = _merge_equal_parts if stage == 3 else _merge_ranges
    tensors = {
        name: (shape, box_parts(shape, pieces))
        for name, shape, pieces in merge(_shapes(state, path), partitions)
    }
    module = state.get("module") or {}
    names = [name for name in state.get("buffer_names") or () if name.endswith(EXPERT_BIAS)]
    tensors |= {
        name: (tuple(module[name].shape), [whole_part(module[name].float())])
        for name in names
        if isinstance(module.get(name), Tensor)
    }
    shared = state.get("shared_params") or {}
    return tensors | {name: tensors[other] for name, other in shared.items() if other in tensors}


def _read(path: Path) -> State:
    content = read_torch_file(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no dictionary: not a file of DeepSpeed")
    return content


def _open_partitions(paths: Paths) -> tuple[int, list[Partition]]:
    """(stage, each data-parallel rank's file and its state) of one model-parallel rank."""
    opened: list[Partition] = []
    first: tuple[Path, tuple[int, int]] | None = None
    for _, path in sorted(paths.items()):
        state = _read(path).get("optimizer_state_dict")
        if not isinstance(state, dict) or "partition_count" not in state:
            raise CheckpointError(f"{path}: holds no partition of ZeRO")
        kind = _stage_and_count(path, state)
        first = first or (path, kind)
        if kind != first[1]:
            raise CheckpointError(
                f"{path}: {_described(kind)}, but {first[0].name} is "
                f"{_described(first[1])}: files of two saves lie in one folder; copy one "
                "save elsewhere"
            )
        opened.append((path, state))
    stage, count = kind
    if sorted(paths) != list(range(count)):
        missing = [rank for rank in range(count) if rank not in paths]
        what = "there are more"
        if missing:
            shown = ", ".join(map(str, missing[:10]))
            what = f"{len(missing)} are missing (of data-parallel ranks {shown})"
        raise CheckpointError(
            f"{first[0]}: is one of {count} partitions, and {what}: bring the files of one "
            "save, of all nodes, into the folder"
        )
    return stage, opened


def _stage_and_count(path: Path, state: State) -> tuple[int, int]:
    """ZeRO's stage, and in how many partitions every group is. Raises CheckpointError."""
    stage = state.get("zero_stage", 1)
    counts = state["partition_count"]
    stage = stage.args[0] if isinstance(stage, Record) and stage.args else stage
    counts = counts if isinstance(counts, list) else [counts]
    if not all(type(each) is int for each in counts):
        raise CheckpointError(f"{path}: partition_count is no number")
    counts = set(counts)
    if type(stage) is not int or stage not in (1, 2, 3) or len(counts) != 1:
        known = stage if type(stage) is int else "unknown"
        raise CheckpointError(
            f"{path}: stage {known} of {' and '.join(sorted(map(str, counts)))} partitions: "
            "stages 1 to 3 are read, with one number of partitions for all groups"
        )
    return stage, counts.pop()


def _described(kind: tuple[int, int]) -> str:
    return f"stage {kind[0]} of {kind[1]} partitions"


def _shapes(state: State, path: Path) -> list[dict[str, Dims]]:
    """Names and shapes of the flattened parameters, group by group."""
    if state.get("frozen_param_shapes"):
        name = next(iter(state["frozen_param_shapes"]))
        fix = "convert with DeepSpeed's zero_to_fp32.py, then --from-huggingface"
        raise CheckpointError(f"{path}: {name} was frozen and has no master weight: {fix}")
    groups = state.get("param_shapes")
    if not isinstance(groups, list):
        raise CheckpointError(
            f"{path}: holds no param_shapes: saved without ZeRO, or by DeepSpeed older than 0.6"
        )
    return [
        {name: tuple(size) if isinstance(size, torch.Size) else () for name, size in shapes.items()}
        for shapes in groups
    ]


def _flats(path: Path, state: State, key: str) -> list[Tensor]:
    """One rank's partitions of all groups."""
    flats = state.get(key)
    if not isinstance(flats, list) or not all(
        isinstance(flat, Tensor) and flat.ndim == 1 and flat.dtype == torch.float32
        for flat in flats
    ):
        raise CheckpointError(
            f"{path}: {key} are no fp32 vectors: master weights of another precision are not read"
        )
    return flats


# name, shape, (first element, elements) of the pieces in order
Merged = Iterator[tuple[str, Dims, list[tuple[int, Tensor]]]]


def _merge_ranges(groups: list[dict[str, Dims]], partitions: list[Partition]) -> Merged:
    """Stages 1 and 2."""
    ranks = [_flats(path, state, "single_partition_of_fp32_groups") for path, state in partitions]
    path, state = partitions[0]
    paddings = state.get("param_alignment_paddings") or [[0] * len(shapes) for shapes in groups]
    if {len(groups), len(paddings)} != {len(flats) for flats in ranks}:
        raise CheckpointError(
            f"{path}: holds {len(ranks[0])} groups of parameters, the model-states file "
            f"{len(groups)}: files of two saves"
        )
    for index, (shapes, gaps) in enumerate(zip(groups, paddings, strict=True)):
        pieces = [flats[index] for flats in ranks]
        at = 0
        ends = list(itertools.accumulate(map(len, pieces)))
        _require_length(path, index, shapes, gaps, ends[-1], len(ranks))
        for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
            yield name, shape, list(_cut(pieces, ends, at, math.prod(shape)))
            at += math.prod(shape) + gap


def _require_length(
    path: Path, index: int, shapes: dict[str, Dims], gaps: list[int], held: int, ranks: int
) -> None:
    """Raise CheckpointError unless group `index`, with its gaps, has `held` elements."""
    wanted = sum(map(math.prod, shapes.values())) + sum(gaps)
    unit = 2 * ranks  # each group is padded to a multiple of this
    if len(gaps) != len(shapes) or -(-wanted // unit) != -(-held // unit):
        raise CheckpointError(
            f"{path}: the partitions of group {index} hold {held} elements, its "
            f"parameters {wanted}: not of the same save"
        )


def _merge_equal_parts(groups: list[dict[str, Dims]], partitions: list[Partition]) -> Merged:
    """Stage 3."""
    ranks = [_flats(path, state, "fp32_flat_groups") for path, state in partitions]
    count = len(partitions)
    every = [list(itertools.accumulate(map(len, flats))) for flats in ranks]
    shapes = {name: shape for group in groups for name, shape in group.items()}
    wanted = sum(-(-math.prod(shape) // count) for shape in shapes.values())
    for (path, _), ends in zip(partitions, every, strict=True):
        if ends[-1:] != [wanted]:
            held = sum(ends[-1:])
            raise CheckpointError(
                f"{path}: its partitions hold {held} elements, its parts of the parameters "
                f"{wanted}: not of the same save"
            )
    at = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        part = -(-size // count)
        pieces = [
            (rank * part + start, piece)
            for rank in range(count)
            for start, piece in _cut(ranks[rank], every[rank], at, min(part, size - rank * part))
        ]
        yield name, shape, pieces
        at += part


def _cut(
    flats: list[Tensor], ends: list[int], start: int, length: int
) -> Iterator[tuple[int, Tensor]]:
    """Elements [start, start + length) of vectors laid end to end as (place from `start` on,
    elements); `ends`: where each vector ends.
    """
    at = start
    for index in range(bisect_right(ends, start), len(flats)):
        if at >= start + length:
            return
        begin = ends[index] - len(flats[index])
        stop = min(start + length, ends[index])
        if stop > at:
            yield at - start, flats[index][at - begin : stop - begin]
            at = stop


def box_parts(shape: Dims, pieces: Iterable[tuple[int, Tensor]]) -> list[Part]:
    """Pieces (first element, elements) of a matrix in C order as boxes of it: whole rows, and the
    ends of rows that are cut. Those of a vector are put together: each would be a tensor by itself
    in the file that is written, and vectors are small.
    """
    if len(shape) != 2:
        values = [piece for _, piece in pieces]
        joined = values[0] if len(values) == 1 else torch.cat([*values, torch.empty(0)])
        return [whole_part(joined.view(shape))]
    parts: list[Part] = []
    width = shape[1]
    for start, piece in pieces:
        stop = start + len(piece)
        # where its whole rows begin and end
        inner = -(-start // width) * width, stop // width * width
        edges = {start, stop, *(edge for edge in inner if start < edge < stop)}
        for low, high in itertools.pairwise(sorted(edges)):
            offset = divmod(low, width)
            size = high - low
            extent = (1, size) if size % width else (size // width, width)
            elements = piece[low - start : high - start].view(extent)
            parts.append(box_part(offset, extent, elements))
    return parts
