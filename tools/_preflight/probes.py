"""What one rank can find out alone: files, folders, versions, clock, and the speed of its device
and of the disk under --save.

Called from tools/_preflight/meeting.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

MISSING = -1  # as the size of a file that cannot be read
FOLDER_BYTES = 1 << 20  # written into each folder that a node needs for itself
FOLDER_SECONDS = 5.0  # in which another node's file appears: NFS remembers for a few that it is not
MARK = ".preflight-seen-"  # begins the names of files by which nodes know a folder
CLOCK_READS = 10


@dataclass(frozen=True)
class Load:
    """Sizes of the measurements of one kind of device. Times are seconds, the rest is bytes."""

    matrix: int  # rows and columns of the factors
    dtype: torch.dtype
    copied: int
    seconds: float  # of each of products and copies
    written: int  # to the disk
    messages: tuple[int, ...]  # sizes over the network


# A CPU is shared: its fastest of many short repetitions is what counts, where a GPU's median over a
# second also shows one that throttles.
LOADS = {
    "cpu": Load(256, torch.float32, 8 << 20, 0.1, 8 << 20, (1 << 16, 1 << 20)),
    "cuda": Load(8192, torch.bfloat16, 1 << 30, 1.0, 512 << 20, (1 << 20, 16 << 20, 256 << 20)),
}


@dataclass(frozen=True)
class Needs:
    """What a run reads and writes."""

    files: tuple[str, ...]  # must be there, alike on all nodes
    fresh: tuple[str, ...]  # may lack on all nodes
    folders: tuple[str, ...]  # each node writes into its own
    save: str | None  # all nodes write into one
    save_bytes: float  # of a checkpoint; 0 where that is not known
    settings: str  # text of the flags
    code: tuple[str, ...]  # folders of the program


@dataclass
class Facts:
    """What a rank has found. `problems` are by what they are about, speeds in GB/s and, of
    products, in TFLOP/s.
    """

    device: str = ""
    backend: str = ""
    files: dict[str, int] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    speeds: dict[str, float] = field(default_factory=dict)
    seen: str = ""  # whose files are in --save
    clock: float = 0.0  # seconds ahead of rank 0's
    free: float | None = None  # bytes that the disk of --save has left


class Probe:
    """One rank's look around; `doing` names the current probe, for the case that it does not come
    back.

    `choose` gives the device and the backend, or raises. `first_of_node`: files, folders and disk
    are looked at by one rank of a node.
    """

    def __init__(
        self,
        needs: Needs,
        choose: Callable[[], tuple[torch.device, str]],
        rank: int,
        *,
        first_of_node: bool,
    ) -> None:
        self.needs, self.choose, self.rank = needs, choose, rank
        self.first_of_node = first_of_node
        self.mark: Path | None = None
        self.facts = Facts()
        self.doing = "starting"
        self.device = torch.device("cpu")

    def leave_mark(self, token: str) -> None:
        """Put a file into --save, by which the other nodes see that it is one folder; before they
        look.
        """
        if self.needs.save is not None and self.first_of_node:
            self.mark = Path(self.needs.save) / f"{MARK}{token}-{self.rank}"
            self.mark.parent.mkdir(parents=True, exist_ok=True)
            self.mark.touch()

    def remove_mark(self) -> None:
        """At the end."""
        if self.mark is not None:
            self.mark.unlink(missing_ok=True)

    def run(self, clock: Callable[[], bytes], nodes: list[int]) -> None:
        """Fill `facts`. `clock` reads rank 0's; `nodes`: the first ranks of all that have come."""
        self.doing = "reading rank 0's clock"
        self.facts.clock = clock_offset(clock)
        self.doing = "choosing a device"
        try:
            self.device, self.facts.backend = self.choose()
        except ValueError as error:  # LaunchError: no GPU, or too few
            self.facts.problems["device"] = str(error)
        self.facts.device = (
            torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        )
        self.doing = "reading versions"
        self.facts.versions = versions(self.needs.settings, self.device)
        load = LOADS[self.device.type]
        self.doing = "multiplying matrices"
        self.facts.speeds["GEMM"] = gemm_speed(self.device, load)
        self.doing = "copying memory"
        self.facts.speeds["copy"] = copy_speed(self.device, load)
        if self.first_of_node:
            self.doing = "reading this program"
            self.facts.versions["this program"] = code_digest(self.needs.code)
            self._look_at_files()
            for folder in self.needs.folders:
                self.doing = f"writing into {folder}"
                self._written(folder, FOLDER_BYTES)
            if self.needs.save is not None:
                self._look_at_save(self.needs.save, nodes)

    def _look_at_files(self) -> None:
        for path in (*self.needs.files, *self.needs.fresh):
            self.doing = f"reading {path}"
            self.facts.files[path] = size_of(path)

    def _look_at_save(self, save: str, nodes: list[int]) -> None:
        self.doing = f"writing into --save {save}"
        speed = self._written(save, LOADS[self.device.type].written)
        if speed and self.mark is not None:
            self.facts.speeds["disk"] = speed
            room = os.statvfs(save)
            self.facts.free = float(room.f_bavail) * room.f_frsize
            self.facts.seen = seen_ranks(self.mark, nodes)

    def _written(self, folder: str, size: int) -> float:
        """GB/s of the faster of two files; 0 and a problem where they cannot be written."""
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            return max(write_speed(Path(folder), size) for _ in range(2))
        except OSError as error:
            self.facts.problems[folder] = (
                f"{size / 2**20:g} MiB cannot be written into it ({error.strerror}); free space "
                "there, correct its rights, or choose another folder"
            )
            return 0.0


def size_of(path: str) -> int:
    """Bytes of a readable file, or of the files in a folder; MISSING where it cannot be read."""
    try:
        if os.path.isdir(path):
            return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
        with open(path, "rb") as file:
            file.read(1)
            return os.fstat(file.fileno()).st_size
    except OSError:
        return MISSING


def seen_ranks(mark: Path, nodes: list[int]) -> str:
    """The ranks whose marks are where this one's is; waits a little for those of `nodes`."""
    until = time.monotonic() + FOLDER_SECONDS
    start = mark.name.rpartition("-")[0] + "-"
    while True:
        names = os.listdir(mark.parent)  # which asks the server, unlike a stat
        seen = {int(name.removeprefix(start)) for name in names if name.startswith(start)}
        if seen >= set(nodes) or time.monotonic() > until:
            return ", ".join(map(str, sorted(seen)))
        time.sleep(0.1)


def write_speed(folder: Path, size: int) -> float:
    """GB/s of a new file, written and synchronised, which is deleted again. Raises OSError."""
    piece = os.urandom(min(size, 1 << 20))  # a file system may compress
    path = folder / f".preflight-{platform.node()}-{os.getpid()}"
    try:
        begun = time.perf_counter()
        with open(path, "wb", buffering=0) as file:
            for _ in range(size // len(piece)):
                if file.write(piece) != len(piece):  # all that still fitted
                    file.write(piece)  # raises
            os.fsync(file.fileno())
        return size / 1e9 / (time.perf_counter() - begun)
    finally:
        path.unlink(missing_ok=True)


def clock_offset(read: Callable[[], bytes]) -> float:
    """Seconds that this clock is ahead of rank 0's, which `read` gives as it was some milliseconds
    ago: what is read late seems to be behind, so that the least difference is the nearest.
    """
    found = []
    for _ in range(CLOCK_READS):
        before = time.time()
        theirs = float(read())
        found.append((before + time.time()) / 2 - theirs)
        time.sleep(0.01)
    return min(found)


def gemm_speed(device: torch.device, load: Load) -> float:
    """TFLOP/s of products of square matrices."""
    a, b = (torch.randn(load.matrix, load.matrix, device=device).to(load.dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * load.matrix**3 / 1e12 / _typical(lambda: torch.mm(a, b, out=out), device, load)


def copy_speed(device: torch.device, load: Load) -> float:
    """GB/s that are read and written by copies from memory to memory."""
    source = torch.zeros(load.copied, dtype=torch.uint8, device=device)
    to = torch.ones_like(source)
    return 2 * load.copied / 1e9 / _typical(lambda: to.copy_(source), device, load)


def _typical(part: Callable[[], Any], device: torch.device, load: Load) -> float:
    """Seconds of one repetition: the median of many on a GPU, the least on a CPU."""
    part()
    synchronize(device)
    taken: list[float] = []
    until = time.monotonic() + load.seconds
    while time.monotonic() < until or len(taken) < 5:
        begun = time.perf_counter()
        part()
        synchronize(device)
        taken.append(time.perf_counter() - begun)
    return min(taken) if device.type == "cpu" else statistics.median(taken)


def synchronize(device: torch.device) -> None:
    """Wait for all that a GPU has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def versions(settings: str, device: torch.device) -> dict[str, str]:
    """Of everything that must be equal on all ranks."""
    found = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "triton": _triton_version(),
        "settings": hashlib.sha256(settings.encode()).hexdigest()[:12],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
    }
    if device.type == "cuda":
        nccl: Any = torch.cuda.nccl  # type: ignore[attr-defined]
        found |= {
            "CUDA": str(torch.version.cuda),
            "NCCL": ".".join(map(str, nccl.version())),
            "driver": driver_version(),
            "GPUs": str(torch.cuda.device_count()),
        }
    return found


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")  # to import it takes seconds
    except importlib.metadata.PackageNotFoundError:
        return "none"


def driver_version() -> str:
    """Of NVIDIA's kernel module, or the CUDA version that its library knows."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
        found = re.search(r"Kernel Module\D*([\d.]+)", text)
        if found:
            return found[1]
    except OSError:
        pass
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return "none"
    return f"of CUDA {number.value // 1000}.{number.value % 1000 // 10}"


def code_digest(folders: Sequence[str]) -> str:
    """Of the Python files in these folders, by name and content."""
    digest = hashlib.sha256()
    for folder in map(Path, folders):
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(folder).as_posix()
            digest.update(json.dumps([name, path.stat().st_size]).encode() + path.read_bytes())
    return digest.hexdigest()[:12]
