"""What other programs keep in pickles, read without importing their classes or calling their code.

Files of torch.save go through torch's `weights_only` loader, with inert stand-ins for the classes
that checkpoints of Megatron-LM and DeepSpeed name; their tensors are mapped, not loaded. The
metadata of a distributed checkpoint is a plain pickle of a newer protocol: an unpickler that knows
these stand-ins alone reads it. Every other global is refused by name.
"""

from __future__ import annotations

import io
import pickle
import re
import signal
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from megatron.tools._convert.models import DAMAGE, MappedFile
from torch import Tensor

from megatron.checkpoint.manifest import CheckpointError
from megatron.config.errors import UserError

_DAMAGE = (*DAMAGE, pickle.UnpicklingError, EOFError, OSError, MemoryError, zipfile.BadZipFile)


class Record:
    """A value of a class that is not imported: the class's name, its arguments and its state."""

    kind = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Record:
        made = object.__new__(cls)
        made.args = args
        made.state = None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        """A field of its state. Raises KeyError."""
        return state_of(self)[name]

    @classmethod
    def named(cls, kind: str) -> type[Record]:
        """The stand-in for a class."""
        return type(kind.rpartition(".")[2], (cls,), {"kind": kind})


def namespace(state: dict[str, Any]) -> Record:
    """Arguments as a checkpoint keeps them."""
    found = CLASSES["argparse.Namespace"]()
    found.state = state
    return found


def state_of(value: Any) -> dict[str, Any]:
    """A copy of a record's fields; empty for what has none."""
    held = value.state if isinstance(value, Record) else None
    return dict(held) if isinstance(held, dict) else {}


def _member(kind: type[Record], name: str) -> Record:
    """In place of getattr, by which some versions of Python write a member of an enumeration."""
    if not (isinstance(kind, type) and issubclass(kind, Record) and isinstance(name, str)):
        raise UserError("it asks a value for an attribute")
    return kind(name)


def _stand_ins(kinds: Iterable[str]) -> dict[str, Any]:
    return {kind: Record.named(kind) for kind in kinds} | {"builtins.getattr": _member}


# What Megatron-LM, DeepSpeed and their users keep with the weights.
CLASSES = _stand_ins(
    """argparse.Namespace types.SimpleNamespace signal.Signals pathlib.PosixPath _io.BytesIO
    numpy.core.multiarray._reconstruct numpy._core.multiarray._reconstruct
    numpy.core.multiarray.scalar numpy._core.multiarray.scalar numpy.ndarray numpy.dtype
    numpy.dtypes.UInt32DType builtins.slice builtins.complex megatron.core.enums.ModelType
    megatron.core.transformer.enums.AttnBackend megatron.core.transformer.enums.AttnMaskType
    megatron.core.transformer.enums.CudaGraphScope
    megatron.core.optimizer.optimizer_config.OptimizerConfig
    megatron.core.rerun_state_machine.RerunDiagnostic megatron.core.rerun_state_machine.RerunMode
    megatron.core.rerun_state_machine.RerunState
    deepspeed.runtime.fp16.loss_scaler.LossScaler
    deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler deepspeed.runtime.zero.config.ZeroStageEnum
    deepspeed.utils.tensor_fragment.fragment_address megatron.enums.ModelType
    megatron.model.enums.ModelType megatron.enums.PositionEmbeddingType""".split()
) | {"collections.defaultdict": lambda *args: {}}
# how some versions of Python write a signal
CLASSES |= _stand_ins(f"signal.{name}" for name in signal.Signals.__members__)

_DTYPES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool strided".split()
# What the metadata of a distributed checkpoint names.
METADATA_CLASSES = _stand_ins(
    [
        *(
            f"torch.distributed.checkpoint.metadata.{name}"
            for name in """Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties
            ChunkStorageMetadata MetadataIndex StorageMeta _MEM_FORMAT_ENCODING""".split()
        ),
        *(
            f"torch.distributed.checkpoint.planner.{name}"
            for name in "SavePlan WriteItem WriteItemType TensorWriteData".split()
        ),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.serialization._get_layout",
        "pathlib.PosixPath",
        "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
    ]
) | {"torch.Size": torch.Size, **{f"torch.{name}": getattr(torch, name) for name in _DTYPES}}


class _MetadataUnpickler(pickle.Unpickler):
    """Finds stand-ins alone, so that it can call nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in METADATA_CLASSES:
            raise UserError(_refusal(full))
        return METADATA_CLASSES[full]


def _refusal(name: str) -> str:
    return f"it names {name}, which has no place in a checkpoint; nothing of it was executed"


def read_metadata(path: Path) -> Record:
    """The metadata of a distributed checkpoint. Raises CheckpointError."""
    try:
        return _MetadataUnpickler(io.BytesIO(MappedFile(path).bytes)).load()
    except _DAMAGE as error:
        raise _refused(path, error) from error


def read_torch_file(path: Path) -> Any:
    """What torch.save wrote; its tensors are mapped. Raises CheckpointError."""
    MappedFile(path)  # a pipe is refused, not waited for
    return _load(path, path, mmap=True)


def map_tensor(file: MappedFile, start: int, length: int) -> Tensor:
    """The one tensor that torch.save wrote to bytes [start, start + length) of a file, mapped.
    Raises CheckpointError.
    """
    if not 0 <= start <= start + length <= file.size:
        raise CheckpointError(
            f"{file.path}: has {file.size} bytes, {start + length} are expected: truncated"
        )
    part = _Part(file, start, length)
    with torch.serialization.skip_data():
        value = _load(part, file.path)
    try:
        with zipfile.ZipFile(part) as archive:
            (data,) = (info for info in archive.infolist() if "/data/" in info.filename)
        header = start + data.header_offset
        names = int.from_bytes(file.bytes[header + 26 : header + 28], "little")
        extra = int.from_bytes(file.bytes[header + 28 : header + 30], "little")
        count = data.file_size // value.element_size()
        flat = file.tensor(value.dtype, (count,), header + 30 + names + extra)
        return flat.as_strided(value.shape, value.stride(), value.storage_offset())
    except _DAMAGE as error:
        raise CheckpointError(
            f"{file.path}: byte {start}: holds no tensor of torch.save: {error}"
        ) from error


def _load(source: Any, path: Path, *, mmap: bool = False) -> Any:
    if not zipfile.is_zipfile(source):
        raise CheckpointError(f"{path}: is not a file of torch.save (since 1.6), or truncated")
    if isinstance(source, _Part):
        source.seek(0)
    stand_ins: list[Any] = [(stand_in, name) for name, stand_in in CLASSES.items()]
    try:
        with torch.serialization.safe_globals(stand_ins), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of deprecated storages
            return torch.load(source, map_location="cpu", mmap=mmap, weights_only=True)
    except _DAMAGE as error:
        raise _refused(path, error) from error


def _refused(path: Path, error: BaseException) -> CheckpointError:
    named = re.search(r"GLOBAL (\S+)", str(error))
    inner = re.search(r"WeightsUnpickler error: (.*)", str(error))
    text = inner[1] if inner else str(error).partition("\n")[0] or type(error).__name__
    if named:  # builtins are named without their module
        text = _refusal(named[1] if "." in named[1] else f"builtins.{named[1]}")
    return CheckpointError(f"{path}: the pickle in it is refused: {text}")


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

    def readinto(self, buffer: Any) -> int:
        part = self.data[self.at : self.at + len(buffer)]
        buffer[: len(part)] = part
        self.at += len(part)
        return len(part)
