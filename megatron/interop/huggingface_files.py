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
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.boxes import intersect
from megatron.checkpoint.files import sync_folder
from megatron.checkpoint.manifest import HEADER_LIMIT, CheckpointError, encode_header
from megatron.checkpoint.ranks import Ranks
from megatron.checkpoint.reader import DTYPE_NAMES, TORCH_DTYPES, Checkpoint
from megatron.checkpoint.shapes import Dims, Shapes
from megatron.config.errors import UserError
from megatron.config.input_files import InputError, parse_json
from megatron.config.input_files import read_json as read_file
from megatron.interop.huggingface_rules import Rule
from megatron.interop.models import DAMAGE, Held, MappedFile, Pair, Part, own_rows, whole_part
from megatron.layers.spec import Box

FILE = 4 << 30  # most bytes of tensors in one file, unless a single tensor is larger
PIECE = 8 << 20  # bytes that are read, converted and written at a time


@dataclass(frozen=True)
class Place:
    """Where one tensor of the export lies: in file `file`, from byte `start` on."""

    rule: Rule
    # of our tensors on top of each other: of theirs, or its columns where it is transposed
    rows: int
    rest: Dims
    file: int
    start: int

    @property
    def numel(self) -> int:
        return self.rows * math.prod(self.rest)

    @property
    def their_shape(self) -> Dims:
        return (*self.rest, self.rows) if self.rule.transposed else (self.rows, *self.rest)


@dataclass(frozen=True)
class ExportLayout:
    """Every tensor's place in the files of an export, and the files' headers by name."""

    places: list[Place]
    headers: dict[str, bytes]
    dtype: torch.dtype

    @property
    def total(self) -> int:
        """Bytes of all tensors."""
        return sum(place.numel for place in self.places) * self.dtype.itemsize

    def sizes(self) -> list[int]:
        """Bytes of each file."""
        sizes = [len(header) for header in self.headers.values()]
        for place in self.places:
            sizes[place.file] = place.start + place.numel * self.dtype.itemsize
        return sizes

    def index(self) -> dict[str, Any]:
        """What model.safetensors.index.json holds."""
        names = list(self.headers)
        weight_map = {place.rule.theirs: names[place.file] for place in self.places}
        return {"metadata": {"total_size": self.total}, "weight_map": weight_map}


def lay_out(rules: list[Rule], shapes: Shapes, dtype: torch.dtype) -> ExportLayout:
    """The layout of an export of the tensors that `rules` name, our `shapes` by name."""
    files = _in_files(rules, shapes, dtype.itemsize)
    places = []
    headers = {}
    for number, tensors in enumerate(files):
        entries = [(place.rule.theirs, DTYPE_NAMES[dtype], place.their_shape) for place in tensors]
        name = "model.safetensors"
        if len(files) > 1:
            name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        headers[name] = encode_header(entries, {"format": "pt"})
        at = len(headers[name])
        for place in tensors:
            places.append(dataclasses.replace(place, start=at))
            at += place.numel * dtype.itemsize
    return ExportLayout(places, headers, dtype)


def _in_files(rules: list[Rule], shapes: Shapes, itemsize: int) -> list[list[Place]]:
    """The tensors of each file; where a tensor begins is not known yet."""
    files: list[list[Place]] = []
    space = 0
    for rule in rules:
        rows = sum(shapes[name][0] for name in rule.ours)
        rest = shapes[rule.ours[0]][1:]
        size = rows * math.prod(rest) * itemsize
        if not files or size > space:
            files.append([])
            space = max(size, FILE)
        files[-1].append(Place(rule, rows, rest, len(files) - 1, start=0))
        space -= size
    return files


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
        (temporary / "model.safetensors.index.json").write_text(index)
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
    elements = sum((last - first) * math.prod(place.rest) for place, first, last in shares)
    report = ProgressLine("exported", elements * layout.dtype.itemsize, ranks.first)
    names = list(layout.headers)
    files = {
        number: os.open(folder / names[number], os.O_WRONLY | os.O_CLOEXEC)
        for number in sorted({place.file for place, _, _ in shares})
    }
    try:
        for place, first, last in shares:
            for row, piece in _pieces(place, first, last, checkpoint, layout.dtype):
                _write_piece(files[place.file], place, row, piece)
                report.add(piece.nbytes)
        for file in files.values():
            os.fsync(file)
    finally:
        for file in files.values():
            os.close(file)


def _pieces(
    place: Place, first: int, last: int, checkpoint: Checkpoint, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor]]:
    """Rows [first, last) of the stacked tensors as (row, a few MiB of rows)."""
    begin = 0
    for name in place.rule.ours:
        stored = checkpoint.tensors[name]
        kept = TORCH_DTYPES[stored.dtype]
        step = max(1, PIECE // (math.prod(place.rest) * max(kept.itemsize, dtype.itemsize)))
        end = begin + stored.shape[0]
        for row in range(max(first, begin), min(last, end), step):
            rows = min(step, last - row, end - row)
            piece = torch.empty((rows, *place.rest), dtype=kept)
            checkpoint.read(
                Box(
                    name, stored.shape, (row - begin, *(0 for _ in place.rest)), tuple(piece.shape)
                ),
                piece,
            )
            yield row, piece.to(dtype)
        begin = end


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
    """The tensors of a Hugging Face folder by name, mapped. Raises CheckpointError."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = read_json(index).get("weight_map")
        if type(files) is not dict or not all(type(name) is str for name in files.values()):
            raise CheckpointError(f"{index}: holds no weight_map of tensors and files")
        names = sorted(set(files.values()))
    elif (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        fix = "pickled weights are not read: save them again with transformers' save_pretrained"
        raise CheckpointError(f"{folder}: no model.safetensors ({fix})")
    tensors: dict[str, Tensor] = {}
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index}: {name!r} is not a plain file name")
        tensors |= _open_file(folder / name)
    return tensors


def _open_file(path: Path) -> dict[str, Tensor]:
    """The floating-point tensors of a safetensors file; others (buffers of old models) are left
    out.
    """
    file = MappedFile(path)
    tensors = {}
    try:
        (length,) = struct.unpack("<Q", file.bytes[:8])
        if length > min(HEADER_LIMIT, file.size - 8):
            raise UserError(f"a header of {length} bytes in a file of {file.size}")
        for key, value in parse_json(file.bytes[8 : 8 + length]).items():
            if key != "__metadata__" and value["dtype"] in TORCH_DTYPES:
                dtype = TORCH_DTYPES[value["dtype"]]
                shape = tuple(map(int, value["shape"]))
                start, stop = value["data_offsets"]
                if min(shape, default=0) < 0 or stop - start != math.prod(shape) * dtype.itemsize:
                    raise UserError(f"{key}: {stop - start} bytes for shape {list(shape)}")
                tensors[key] = file.tensor(dtype, shape, 8 + length + start)
    except DAMAGE as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return tensors


def take_rules(rules: list[Rule], tensors: dict[str, Tensor]) -> list[Pair]:
    """The logical tensors, whole, as they lie in Hugging Face's."""
    return take_parts(
        rules, {name: (tuple(value.shape), [whole_part(value)]) for name, value in tensors.items()}
    )


def take_parts(rules: list[Rule], tensors: Held) -> list[Pair]:
    """The logical tensors as they lie in parts (shape, parts) of Hugging Face's. Raises UserError
    for one that cannot be cut as its rule says.
    """
    return [pair for rule in rules for pair in _cut_rows(rule, *tensors[rule.theirs])]


def _cut_rows(rule: Rule, shape: Dims, parts: list[Part]) -> Iterator[Pair]:
    """The logical tensors of one rule."""
    if rule.matrices is not None:
        shape, parts = _on_top_of_each_other(rule, shape, parts)
    turn = -1 if rule.transposed else 1
    shape = shape[::turn]
    rows, rest = divmod(shape[0], len(rule.ours))
    if rest:
        raise UserError(f"{rule.theirs} {list(shape)} does not hold {' and '.join(rule.ours)}")
    for offset, extent, elements in parts:
        value = elements().t() if rule.transposed else elements()
        (first, *columns), (count, *widths) = offset[::turn], extent[::turn]
        for i, name in enumerate(rule.ours):
            common = intersect((i * rows,), (rows,), (first,), (count,))
            if common is None:
                continue
            (low,), (high,) = common
            box = Box(name, (rows, *shape[1:]), (low - i * rows, *columns), (high - low, *widths))
            yield box, value[low - first : high - first]


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
