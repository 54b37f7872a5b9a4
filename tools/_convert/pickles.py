"""What files of other programs say in pickles, without executing any: an interpreter that knows no
classes and calls nothing.

Every class or function that a pickle names must be on the list of those that checkpoints contain,
and becomes an inert `Record` of its name and its arguments; anything else is refused by name. Files
of torch.save are zip files: their tensors are mapped, not loaded.
"""

from __future__ import annotations

import io
import pickletools
import signal
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.tools._convert.models import DAMAGE, MappedFile
from torch import Tensor

from megatron.checkpoint.manifest import CheckpointError
from megatron.config.errors import UserError

STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
_DCP = "torch.distributed.checkpoint.metadata."
_MCORE = "megatron.core."
DCP_CLASSES = {
    *(
        _DCP + name
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    # cached plans
    *(
        f"torch.distributed.checkpoint.planner.{name}"
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "torch.Size",
    "pathlib.PosixPath",
    "builtins.getattr",
    _MCORE + "dist_checkpointing.strategies.torch.MCoreMetadata",
    *map(str, STORAGES.values()),
    "torch.strided",
}
TORCH_CLASSES = {
    *STORAGES,
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
    "collections.OrderedDict",
    "torch.Size",
    "torch.device",
    *map(str, STORAGES.values()),
}
ARGUMENT_CLASSES = TORCH_CLASSES | {  # what Megatron-LM keeps beside the weights
    "builtins.getattr",
    "argparse.Namespace",
    "types.SimpleNamespace",
    "signal.Signals",
    "pathlib.PosixPath",
    "_io.BytesIO",
    "_codecs.encode",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    # how some versions of Python write a signal
    *(f"signal.{name}" for name in signal.Signals.__members__),
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.dtypes.UInt32DType",
    "collections.defaultdict",
    "builtins.slice",
    "builtins.complex",
    *(
        _MCORE + name
        for name in (
            "enums.ModelType",
            "transformer.enums.AttnBackend",
            "transformer.enums.AttnMaskType",
            "transformer.enums.CudaGraphScope",
            "optimizer.optimizer_config.OptimizerConfig",
            "rerun_state_machine.RerunDiagnostic",
            "rerun_state_machine.RerunMode",
            "rerun_state_machine.RerunState",
        )
    ),
}

_DS = "deepspeed."
DEEPSPEED_CLASSES = ARGUMENT_CLASSES | {  # what DeepSpeed and its users keep beside the partitions
    "torch._tensor._rebuild_from_type_v2",
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    *(
        _DS + name
        for name in (
            "runtime.fp16.loss_scaler.LossScaler",
            "runtime.fp16.loss_scaler.DynamicLossScaler",
            "runtime.zero.config.ZeroStageEnum",
            "utils.tensor_fragment.fragment_address",
        )
    ),
    "megatron.enums.ModelType",
    "megatron.model.enums.ModelType",
    "megatron.enums.PositionEmbeddingType",
}


@dataclass(eq=False)
class Record:
    """A value of some class that the pickle names: nothing of that class exists here. `state` is a
    dictionary or what else it holds.
    """

    kind: str
    args: tuple[Any, ...] | None  # None: the class itself
    state: Any = None

    def __getitem__(self, name: str) -> Any:
        """A field of its state. Raises KeyError."""
        if not isinstance(self.state, dict):
            raise KeyError(name)
        return self.state[name]


def state_of(value: Any) -> dict[str, Any]:
    """A copy of a record's fields; empty for what has none."""
    held = value.state if isinstance(value, Record) else None
    return dict(held) if isinstance(held, dict) else {}


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}  # sizes
_VALUES = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "LONG4",
    "BINFLOAT",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "BINUNICODE8",
    "SHORT_BINBYTES",
    "BINBYTES",
    "BINBYTES8",
    "BINSTRING",
    "SHORT_BINSTRING",
}


class _Interpreter:
    """The stack machine of pickle protocols 2 to 5."""

    def __init__(self, known: set[str], storage: Callable[[Any], Any] | None) -> None:
        self.known = known
        self.storage = storage
        self.stack: list[Any] = []  # since the last mark
        self.below: list[list[Any]] = []  # the stacks before each mark
        self.memo: dict[int, Any] = {}

    def run(self, raw: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(raw):
            name = opcode.name
            if name == "STOP":
                return self.stack.pop()
            if name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name in _EMPTY:
                self.stack.append(_EMPTY[name]())
            elif name in _VALUES:
                self.stack.append(argument)
            elif name in _TUPLES:
                self._tuple(_TUPLES[name])
            elif name == "PROTO" and argument > 5:
                raise UserError(f"pickle protocol {argument} is not known")
            elif name not in ("PROTO", "FRAME"):
                step = getattr(self, f"op_{name}", None)
                if step is None:
                    raise UserError(f"the pickle instruction {name} has no place in a checkpoint")
                step(argument)
        raise UserError("the pickle has no end")

    def _marked(self) -> list[Any]:
        values = self.stack
        self.stack = self.below.pop()
        return values

    def op_MARK(self, _: Any) -> None:
        self.below.append(self.stack)
        self.stack = []

    def op_POP(self, _: Any) -> None:
        self.stack.pop()

    def op_TUPLE(self, _: Any) -> None:
        values = self._marked()
        self.stack.append(tuple(values))

    def _tuple(self, size: int) -> None:
        if len(self.stack) < size:
            raise UserError(f"a tuple of {size} values is made of {len(self.stack)}")
        self.stack[-size:] = [tuple(self.stack[-size:])]

    def op_APPEND(self, _: Any) -> None:
        value = self.stack.pop()
        _expect(self.stack[-1], list).append(value)

    def op_APPENDS(self, _: Any) -> None:
        values = self._marked()
        _expect(self.stack[-1], list).extend(values)

    def op_ADDITEMS(self, _: Any) -> None:
        values = self._marked()
        _expect(self.stack[-1], set).update(map(_key, values))

    def op_SETITEM(self, _: Any) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        _expect(self.stack[-1], dict)[_key(key)] = value

    def op_SETITEMS(self, _: Any) -> None:
        values = self._marked()
        _expect(self.stack[-1], dict).update(zip(map(_key, values[::2]), values[1::2], strict=True))

    def op_MEMOIZE(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def op_BINPUT(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    op_LONG_BINPUT = op_BINPUT

    def op_BINGET(self, place: int) -> None:
        self.stack.append(self.memo[place])

    op_LONG_BINGET = op_BINGET

    def op_GLOBAL(self, argument: str) -> None:
        self._name(*argument.split(" ", 1))

    def op_STACK_GLOBAL(self, _: Any) -> None:
        name = self.stack.pop()
        module = self.stack.pop()
        self._name(_expect(module, str), _expect(name, str))

    def _name(self, module: str, name: str) -> None:
        full = f"{module}.{name}".replace("__builtin__.", "builtins.", 1)
        if full not in self.known:
            raise UserError(
                f"it names {full}, which has no place in a checkpoint; nothing of it was executed"
            )
        self.stack.append(Record(full, None))

    def op_REDUCE(self, _: Any) -> None:
        args = self.stack.pop()
        kind = self.stack.pop()
        self.stack.append(self._made(kind, args))

    op_NEWOBJ = op_REDUCE

    def _made(self, kind: Any, args: Any) -> Any:
        _expect(args, tuple)
        if _expect(kind, Record).args is not None:
            raise UserError(f"it calls a value of {kind.kind}")
        # how some versions of Python write a member of an enumeration: of a class that is known,
        # its name
        if kind.kind == "builtins.getattr":
            if _expect(args[0], Record).args is not None:
                raise UserError(f"it asks a value of {args[0].kind} for something")
            return Record(args[0].kind, (_expect(args[1], str),))
        if kind.kind in ("collections.OrderedDict", "collections.defaultdict"):
            return {}
        if kind.kind == "torch._utils._rebuild_tensor_v2":
            storage, offset, size, stride = args[:4]
            if any(
                type(each) is not int
                for each in (offset, *_expect(size, tuple), *_expect(stride, tuple))
            ):
                raise UserError("a tensor's shape, strides or offset are no numbers")
            # torch refuses what reaches beyond the storage
            return _expect(storage, Tensor).as_strided(size, stride, offset)
        if kind.kind == "torch._utils._rebuild_parameter":
            return _expect(args[0], Tensor)
        # the way to make a tensor, its class, what goes into it, attributes
        if kind.kind == "torch._tensor._rebuild_from_type_v2":
            return _expect(self._made(args[0], args[2]), Tensor)
        return Record(kind.kind, args)

    def op_BUILD(self, _: Any) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Record) and target.args is not None:
            target.state = state
        elif not isinstance(target, dict):  # attributes of an ordered dictionary are let go
            raise UserError("it sets the state of something that has none")

    def op_BINPERSID(self, _: Any) -> None:
        if self.storage is None:
            raise UserError("it refers to something outside it")
        self.stack.append(self.storage(self.stack.pop()))


def _expect(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise UserError(f"a {kind.__name__} is expected, {type(value).__name__} was found")
    return value


_PLAIN = (str, int, float, bool, bytes, type(None), Record)


def _key(value: Any) -> Any:
    """A key of a dictionary or member of a set: to hash tuples of tuples can take for ever, and no
    checkpoint has such keys.
    """
    if not isinstance(value, _PLAIN) and not (
        type(value) is tuple and all(isinstance(each, _PLAIN) for each in value)
    ):
        raise UserError(f"a {type(value).__name__} is the key of a dictionary")
    return value


def read_pickle(
    raw: bytes, known: set[str], path: Path, storage: Callable[[Any], Any] | None = None
) -> Any:
    """The value that the pickle `raw` describes: plain Python values and Records of `known` names;
    `storage` turns references to storages into flat tensors. Raises CheckpointError, naming `path`,
    for anything else.
    """
    try:
        return _Interpreter(known, storage).run(raw)
    except DAMAGE as error:
        raise CheckpointError(f"{path}: the pickle in it is refused: {error}") from error


class _Part(io.RawIOBase):
    """A range of a mapped file, as a file."""

    def __init__(self, file: MappedFile, start: int, length: int) -> None:
        self.data = memoryview(file.bytes)[start : start + length]
        self.at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = max(0, (0, self.at, len(self.data))[whence] + offset)
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, size: int = -1) -> bytes:
        """As of every file, but without a buffer of `size` bytes first: a damaged archive may ask
        for any number of them.
        """
        stop = len(self.data) if size < 0 else self.at + size
        part = bytes(self.data[self.at : stop])
        self.at += len(part)
        return part

    def readinto(self, buffer: Any) -> int:
        part = self.data[self.at : self.at + len(buffer)]
        buffer[: len(part)] = part
        self.at += len(part)
        return len(part)


def read_torch_file(
    file: MappedFile, known: set[str] = TORCH_CLASSES, start: int = 0, length: int | None = None
) -> Any:
    """What torch.save wrote to bytes [start, start + length) of a file; its tensors are mapped.
    Raises CheckpointError.
    """
    length = file.size - start if length is None else length
    if start < 0 or length < 0 or start + length > file.size:
        raise CheckpointError(
            f"{file.path}: has {file.size} bytes, {start + length} are expected: truncated"
        )
    entries, raw = _open_archive(file, start, length)

    def storage(reference: Any) -> Tensor:
        return _storage(reference, entries, file, start)

    return read_pickle(raw, known, file.path, storage)


def _open_archive(
    file: MappedFile, start: int, length: int
) -> tuple[dict[str, zipfile.ZipInfo], bytes]:
    """An archive's entries, by their names without the folder, and its pickle. Raises
    CheckpointError.
    """
    try:
        with zipfile.ZipFile(_Part(file, start, length)) as archive:
            entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            packed = any(info.compress_type != zipfile.ZIP_STORED for info in entries.values())
            if packed or "data.pkl" not in entries:
                raise UserError("not as torch.save writes it")
            if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
                raise UserError("written on a machine with another byte order")
            return entries, archive.read(entries["data.pkl"])
    except (zipfile.BadZipFile, ValueError, OSError, struct.error, RuntimeError, EOFError) as error:
        raise CheckpointError(
            f"{file.path}: is not a file of torch.save (since 1.6): {error}"
        ) from error


def _storage(
    reference: Any, entries: dict[str, zipfile.ZipInfo], file: MappedFile, start: int
) -> Tensor:
    """The flat tensor that a pickle refers to; `start`: where the archive begins in the file.
    Raises UserError.
    """
    kind, storage_class, key, _, count = _expect(reference, tuple)
    if (
        kind != "storage"
        or _expect(storage_class, Record).kind not in STORAGES
        or type(key) is not str
        or type(count) is not int
    ):
        raise UserError("a reference to something that is no storage")
    info = entries[f"data/{key}"]
    dtype = STORAGES[storage_class.kind]
    if info.file_size != count * dtype.itemsize:
        raise UserError(
            f"storage {key} has {info.file_size} bytes, {count * dtype.itemsize} are expected"
        )
    header = start + info.header_offset
    name, extra = struct.unpack("<HH", file.bytes[header + 26 : header + 30])
    return file.tensor(dtype, (count,), header + 30 + name + extra)
