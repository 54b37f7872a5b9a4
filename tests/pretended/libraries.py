"""Compiles the two small libraries of the pretended GPU, each once for its text and torch."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILT = ROOT / "build" / "pretended"  # not in git; kept from one run of the tests to the next


def missing_compiler() -> str | None:
    """Why nothing can be compiled here; None where it can. Triton's launcher needs gcc too."""
    missing = [name for name in ("gcc", "g++") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not found" if missing else None


def load_device_guard() -> None:
    """Make autograd believe in a CUDA device (device_guard.cpp), in this process and for good.
    Torch looks for its CUDA library once, when it is imported: to be called before that.
    """
    torch = _folder_of("torch")
    command = ["g++", "-shared", "-fPIC", "-std=c++20", f"-I{torch / 'include'}"]
    guard = _library("libdevice_guard.so", HERE / "device_guard.cpp", command)
    for path in (torch / "lib/libc10.so", torch / "lib/libtorch_cpu.so", guard):
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    importlib.import_module("torch")  # of a CUDA build, it stores another guard
    library.store_guard()


def driver() -> Path:
    """The driver's library, which Triton's launcher loads by its name (driver.c)."""
    include = _folder_of("triton") / "backends/nvidia/include"
    command = ["gcc", "-shared", "-fPIC", "-Wall", f"-I{include}", "-Wl,-soname,libcuda.so.1"]
    return _library("libcuda.so.1", HERE / "driver.c", command)


def _folder_of(package: str) -> Path:
    return Path(importlib.util.find_spec(package).submodule_search_locations[0])


def _library(name: str, source: Path, command: list[str]) -> Path:
    """The library in a folder named by its text, where one process at a time may have made it."""
    words = "\n".join([importlib.metadata.version("torch"), *command, source.read_text()])
    folder = BUILT / hashlib.sha256(words.encode()).hexdigest()[:16]
    library = folder / name
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    # several processes of the tests may come here together
    own = folder / f"{name}.{os.getpid()}"
    subprocess.run([*command, "-o", own, source], check=True)
    own.replace(library)
    return library
