"""Hugging Face model folders, written and read by all ranks at once.

A safetensors file's header gives every tensor its place, and the header follows from names and
shapes alone: each rank writes its equal share of all rows straight into the final files, and equal
state gives equal bytes for every number of ranks. A folder that appears under its name is complete.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.tools._convert.huggingface import BUFFERS, head_names
from megatron.tools._convert.huggingface_rules import EXPERT_BIAS, RowRun, Rule, row_runs
from megatron.tools._convert.models import (
    DAMAGE,
    Held,
    MappedFile,
    Pair,
    Part,
    own_rows,
    whole_part,
)
from torch import Tensor

from megatron.checkpoint.boxes import Dims
from megatron.checkpoint.files import sync_folder
from megatron.checkpoint.manifest import HEADER_LIMIT, CheckpointError, encode_header
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.reader import DTYPE_NAMES, TORCH_DTYPES, Checkpoint
from megatron.config.errors import UserError
from megatron.config.input_files import InputError, JsonObject, parse_json
from megatron.config.input_files import read_json as read_file
from megatron.model.spec import Box

FILE = 4 << 30  # most bytes of tensors in one file, unless a single tensor is larger
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
PIECE = 8 << 20  # bytes that are read, converted and written at a time


@dataclass(frozen=True)
class Place:
    """Where one tensor of the export lies: in file `file`, from byte `start` on."""

    rule: Rule
    # of our tensors on top of each other: of theirs, or its columns where it is transposed
    rows: int
    rest: Dims
    dtype: torch.dtype
    file: int
    start: int

    @property
    def bytes(self) -> int:
        return self.rows * math.prod(self.rest) * self.dtype.itemsize

    @property
    def their_shape(self) -> Dims:
        if self.rule.matrices is not None:
            return (self.rule.matrices, self.rows // self.rule.matrices, *self.rest)
        return (*self.rest, self.rows) if self.rule.transposed else (self.rows, *self.rest)


@dataclass(frozen=True)
class ExportLayout:
    """Every tensor's place in the files of an export, and the files' headers by name."""

    places: list[Place]
    headers: dict[str, bytes]

    @property
    def total(self) -> int:
        """Bytes of all tensors."""
        return sum(place.bytes for place in self.places)

    def sizes(self) -> list[int]:
        """Bytes of each file."""
        sizes = [len(header) for header in self.headers.values()]
        for place in self.places:
            sizes[place.file] = place.start + place.bytes
        return sizes

    def index(self) -> dict[str, Any]:
        """What model.safetensors.index.json holds."""
        names = list(self.headers)
        weight_map = {place.rule.theirs: names[place.file] for place in self.places}
        return {"metadata": {"total_size": self.total}, "weight_map": weight_map}


def lay_out(rules: list[Rule], shapes: dict[str, Dims], dtype: torch.dtype) -> ExportLayout:
    """The layout of an export of the tensors that `rules` name, our `shapes` by name."""
    files = _in_files(rules, shapes, dtype)
    places = []
    headers = {}
    for number, tensors in enumerate(files):
        tensors.sort(key=lambda place: -place.dtype.itemsize)  # so that all are aligned
        entries = [
            (place.rule.theirs, DTYPE_NAMES[place.dtype], place.their_shape) for place in tensors
        ]
        name = SINGLE
        if len(files) > 1:
            name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        headers[name] = encode_header(entries, {"format": "pt"})
        at = len(headers[name])
        for place in tensors:
            places.append(dataclasses.replace(place, start=at))
            at += place.bytes
    return ExportLayout(places, headers)


def _in_files(rules: list[Rule], shapes: dict[str, Dims], dtype: torch.dtype) -> list[list[Place]]:
    """The tensors of each file; where a tensor begins is not known yet."""
    files: list[list[Place]] = []
    space = 0
    for rule in rules:
        rows = sum(shapes[name][0] for name in rule.ours)
        rest = shapes[rule.ours[0]][1:]
        place = Place(rule, rows, rest, _stored_dtype(rule, dtype), file=0, start=0)
        if not files or place.bytes > space:
            files.append([])
            space = max(place.bytes, FILE)
        files[-1].append(dataclasses.replace(place, file=len(files) - 1))
        space -= place.bytes
    return files


def _stored_dtype(rule: Rule, dtype: torch.dtype) -> torch.dtype:
    """At least fp32 for the expert bias, as in transformers: its steps are lost in 16 bits."""
    if rule.theirs.endswith(EXPERT_BIAS) and dtype.itemsize < 4:
        return torch.float32
    return dtype


def write_folder(
    target: Path,
    checkpoint: Checkpoint,
    rules: list[Rule],
    dtype: torch.dtype,
    extras: Callable[[Path], list[str]],
    ranks: Ranks,
) -> list[str]:
    """Write the weights that `rules` name to the new folder `target`, with what `extras` adds to it
    on the first rank; returns its lines.

    Raises CheckpointError, on several ranks the same UserError on each; nothing is left then.
    """
    shapes = {name: stored.shape for name, stored in checkpoint.tensors.items()}
    layout = lay_out(rules, shapes, dtype)
    # drawn by each rank, the first one's is used
    temporary = target.parent / f".{target.name}-{os.urandom(8).hex()}"

    def make() -> tuple[str, list[str]] | None:
        return (str(temporary), _make_folder(temporary, target, layout)) if ranks.first else None

    def finish() -> list[str] | None:
        if not ranks.first:
            return None
        added = extras(temporary)
        _publish(temporary, target, layout)
        return added

    def on_all_ranks(part: Callable[[], Any]) -> Any:
        return ranks.gather_or_raise(lambda: _in_words(target, part))[0]

    try:
        folder, notes = on_all_ranks(make)
        on_all_ranks(lambda: _write_share(Path(folder), layout, checkpoint, ranks))
        return notes + on_all_ranks(finish)
    except BaseException:
        if ranks.first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _make_folder(temporary: Path, target: Path, layout: ExportLayout) -> list[str]:
    """Make the folder with files of the final sizes; notes about what other exports have left.
    Raises CheckpointError when the disk has too little space.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    leftovers = list(target.parent.glob(f".{target.name}-{'?' * 16}"))
    temporary.mkdir()
    free = shutil.disk_usage(temporary).free
    if free < layout.total:
        raise CheckpointError(
            f"{target}: the export takes {layout.total / 2**30:.2f} GiB, its disk has "
            f"{free / 2**30:.2f} GiB left"
        )
    for (name, header), size in zip(layout.headers.items(), layout.sizes(), strict=True):
        with open(temporary / name, "xb") as file:
            file.write(header)
            file.truncate(size)
    return [
        f"note: {left} is left of an export that was interrupted: delete it" for left in leftovers
    ]


def _publish(temporary: Path, target: Path, layout: ExportLayout) -> None:
    """Give the finished folder its name, durably."""
    if len(layout.headers) > 1:
        index = json.dumps(layout.index(), indent=2) + "\n"
        (temporary / INDEX).write_text(index)
    for path in temporary.iterdir():
        _sync(path)
    sync_folder(temporary)
    os.rename(temporary, target)
    sync_folder(target.parent)


def _in_words(target: Path, part: Callable[[], Any]) -> Any:
    try:
        return part()
    except OSError as error:
        raise CheckpointError(
            f"{target}: was not written: {error.strerror} ({error.filename or target})"
        ) from error


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _write_share(folder: Path, layout: ExportLayout, checkpoint: Checkpoint, ranks: Ranks) -> None:
    """This rank's rows of all tensors, durably."""
    sizes = [(place.rows, math.prod(place.rest)) for place in layout.places]
    shares = [
        (place, first, last)
        for place, (first, last) in zip(
            layout.places, own_rows(sizes, ranks.world.rank, ranks.world.size), strict=True
        )
        if first < last
    ]
    size = sum(place.bytes * (last - first) // place.rows for place, first, last in shares)
    report = ProgressLine("exported", size, ranks.first)
    names = list(layout.headers)
    files = {
        number: os.open(folder / names[number], os.O_WRONLY | os.O_CLOEXEC)
        for number in sorted({place.file for place, _, _ in shares})
    }
    try:
        for place, first, last in shares:
            for row, piece in _pieces(place, first, last, checkpoint):
                _write_piece(files[place.file], place, row, piece)
                report.add(piece.nbytes)
        for file in files.values():
            os.fsync(file)
    finally:
        for file in files.values():
            os.close(file)


def _pieces(
    place: Place, first: int, last: int, checkpoint: Checkpoint
) -> Iterator[tuple[int, Tensor]]:
    """Rows [first, last) of the stacked tensors as (row, a few MiB of rows)."""
    found = row_runs(place.rule, place.rows)
    widest = max(TORCH_DTYPES[checkpoint.tensors[name].dtype].itemsize for name in place.rule.ours)
    step = max(1, PIECE // (math.prod(place.rest) * max(widest, place.dtype.itemsize)))
    for row in range(first, last, step):
        rows = min(step, last - row)
        piece: Tensor | None = None
        for run in found:
            low, high = run.within(row, rows)
            if low >= high:
                continue
            own = _read_rows(checkpoint, run, low, high, place.rest)
            if place.rule.offset:
                own = own - place.rule.offset
            if high - low == rows:  # all are of this run: no second copy
                piece = own.to(place.dtype)
                break
            if piece is None:
                piece = torch.empty((rows, *place.rest), dtype=place.dtype)
            begin = run.first + low * run.stride - row
            piece[begin :: run.stride][: high - low] = own
        assert piece is not None
        yield row, piece
        del own, piece  # before the next ones are read


def _read_rows(checkpoint: Checkpoint, run: RowRun, low: int, high: int, rest: Dims) -> Tensor:
    """Rows [low, high) of a run as the checkpoint has them."""
    stored = checkpoint.tensors[run.name]
    rows = torch.empty((high - low, *rest), dtype=TORCH_DTYPES[stored.dtype])
    offset = (run.start + low, *(0 for _ in rest))
    checkpoint.read(Box(run.name, stored.shape, offset, tuple(rows.shape)), rows)
    return rows


def _write_piece(file: int, place: Place, row: int, piece: Tensor) -> None:
    """Rows from `row` on where they belong; a transposed tensor holds them as columns."""
    size = piece.element_size()
    rest = math.prod(place.rest)
    if not place.rule.transposed:
        _write_at(file, piece, place.start + row * rest * size)
    elif len(piece) == place.rows:
        _write_at(file, piece.t().contiguous(), place.start)
    else:
        for line, columns in enumerate(piece.t().contiguous()):
            _write_at(file, columns, place.start + (line * place.rows + row) * size)


def _write_at(file: int, data: Tensor, position: int) -> None:
    left = memoryview(data.reshape(-1).view(torch.uint8).numpy())
    while len(left):
        written = os.pwrite(file, left, position)
        left = left[written:]
        position = position + written


@dataclass
class ProgressLine:
    """Every 5 seconds a line with the share done and the time left."""

    verb: str
    total: int
    shown: bool
    done: int = 0

    def __post_init__(self) -> None:
        self.begin = self.last = time.monotonic()

    def add(self, size: int) -> None:
        self.done += size
        now = time.monotonic()
        if self.shown and now - self.last > 5:
            self.last = now
            left = (now - self.begin) * (self.total / self.done - 1)
            print(
                f"{self.verb} {self.done / 2**30:.1f} of {self.total / 2**30:.1f} GiB, "
                f"{left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )


# ---- reading -------------------------------------------------------------------------------------


def open_folder(folder: Path) -> dict[str, Tensor]:
    """The tensors of a Hugging Face folder by name, mapped. Raises CheckpointError, also for a
    folder in which two models lie.
    """
    names, listed = _file_names(folder)
    tensors: dict[str, Tensor] = {}
    for name in names:
        found = _open_file(folder / name)
        repeated = sorted(found.keys() & tensors.keys())
        wrong = sorted(key for key in found if listed is not None and listed.get(key) != name)
        if repeated or wrong:
            raise CheckpointError(
                f"{folder / name}: its tensor {(repeated or wrong)[0]} is "
                + ("in another file, too" if repeated else f"not of this file in {folder / INDEX}")
                + ": remove the files of the model that is not wanted"
            )
        tensors |= found
    missing = sorted((listed or {}).keys() - tensors.keys())
    if missing:
        raise CheckpointError(
            f"{folder / INDEX}: lists {missing[0]} ({len(missing)} such tensors), which "
            f"{(listed or {})[missing[0]]} does not hold"
        )
    return tensors


def _file_names(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """The files of a folder's model, and the file of each tensor where there is an index."""
    index, single = folder / INDEX, folder / SINGLE
    if not index.is_file() and not single.is_file():
        fix = "pickled weights are not read: save them again with transformers' save_pretrained"
        raise CheckpointError(f"{folder}: no {SINGLE} ({fix})")
    present = {path.name for path in folder.glob("model*.safetensors")}
    listed = None
    names = {SINGLE}
    if index.is_file():
        listed = read_json(index).get("weight_map")
        if type(listed) is not dict or not all(type(name) is str for name in listed.values()):
            raise CheckpointError(f"{index}: holds no weight_map of tensors and files")
        names = set(listed.values())
        for name in sorted(names):
            if Path(name).name != name:
                raise CheckpointError(f"{index}: {name!r} is not a plain file name")
    others = sorted(
        name for name in present - names if name == SINGLE or SHARD.fullmatch(name) is not None
    )
    if others:
        raise CheckpointError(
            f"{folder}: two models lie there: {others[0]} is not of the model of "
            f"{index.name if listed is not None else SINGLE}; remove the files of the other one"
        )
    return sorted(names), listed


def _open_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file without buffers of integers, which old models have. Raises
    CheckpointError.
    """
    file = MappedFile(path)
    tensors = {}
    try:
        (length,) = struct.unpack("<Q", file.bytes[:8])
        if length > min(HEADER_LIMIT, file.size - 8):
            raise UserError(f"a header of {length} bytes in a file of {file.size}")
        for key, value in parse_json(file.bytes[8 : 8 + length]).items():
            if key == "__metadata__":
                continue
            if value["dtype"] not in TORCH_DTYPES and not key.endswith(BUFFERS):
                raise UserError(
                    f"{key} is of type {value['dtype']}: the weights must be plain floating-point "
                    "numbers"
                )
            if value["dtype"] in TORCH_DTYPES:
                dtype = TORCH_DTYPES[value["dtype"]]
                shape = tuple(map(int, value["shape"]))
                start, stop = value["data_offsets"]
                if min(shape, default=0) < 0 or stop - start != math.prod(shape) * dtype.itemsize:
                    raise UserError(f"{key}: {stop - start} bytes for shape {list(shape)}")
                tensors[key] = file.tensor(dtype, shape, 8 + length + start)
    except DAMAGE as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return tensors


def without_copied_head(config: JsonObject, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without a head that is a copy of the embedding, where config.json ties the two.
    A head that differs stays: transformers takes it, and so does an import.
    """
    found = head_names(config, tensors)
    if found is None or not torch.equal(*(tensors.get(name, torch.empty(0)) for name in found)):
        return tensors
    return {name: tensor for name, tensor in tensors.items() if name != found[1]}


def take_rules(rules: list[Rule], tensors: dict[str, Tensor]) -> list[Pair]:
    """The logical tensors, whole, as they lie in Hugging Face's."""
    return take_parts(
        rules, {name: (tuple(value.shape), [whole_part(value)]) for name, value in tensors.items()}
    )


def take_parts(rules: list[Rule], tensors: Held) -> list[Pair]:
    """The logical tensors as they lie in parts (shape, parts) of Hugging Face's. Raises UserError
    for one that cannot be cut as its rule specifies.
    """
    return [pair for rule in rules for pair in _cut_rows(rule, *tensors[rule.theirs])]


def _cut_rows(rule: Rule, shape: Dims, parts: list[Part]) -> Iterator[Pair]:
    """The logical tensors of one rule."""
    if rule.matrices is not None:
        shape, parts = _on_top_of_each_other(rule, shape, parts)
    turn = -1 if rule.transposed else 1
    shape = shape[::turn]
    found = row_runs(rule, shape[0])
    heights: dict[str, int] = {}
    for run in found:
        heights[run.name] = heights.get(run.name, 0) + run.rows
    for offset, extent, elements in parts:
        value = _our_values(rule, elements())
        (first, *columns), (count, *widths) = offset[::turn], extent[::turn]
        for run in found:
            low, high = run.within(first, count)
            if low < high:
                begin = run.first + low * run.stride - first
                whole = (heights[run.name], *shape[1:])
                start = (run.start + low, *columns)
                box = Box(run.name, whole, start, (high - low, *widths))
                yield box, value[begin :: run.stride][: high - low]


def _our_values(rule: Rule, value: Tensor) -> Tensor:
    """Elements of theirs as they are in ours."""
    if rule.offset:
        # in fp32, since 1 + a small number has no digits left in bf16
        return value.to(torch.promote_types(value.dtype, torch.float32)) + rule.offset
    return value.t() if rule.transposed else value


def _on_top_of_each_other(rule: Rule, shape: Dims, parts: list[Part]) -> tuple[Dims, list[Part]]:
    """[matrices, rows, columns] as one matrix [matrices x rows, columns]."""
    if len(shape) != 3 or shape[0] != rule.matrices:
        raise UserError(
            f"{rule.theirs} {list(shape)} does not hold {rule.matrices} matrices, one an expert"
        )
    rows = shape[1]

    def matrices(part: Part) -> Iterator[Part]:
        (first, row, column), (count, *extent), elements = part
        for i in range(count):
            offset = ((first + i) * rows + row, column)
            yield offset, tuple(extent), functools.partial(_matrix, elements, i)

    return (shape[0] * rows, shape[2]), [each for part in parts for each in matrices(part)]


def _matrix(elements: Callable[[], Tensor], number: int) -> Tensor:
    return elements()[number]


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError unless the file is a JSON object."""
    try:
        return read_file(path)
    except InputError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
