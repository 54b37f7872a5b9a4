"""Print the device, its driver and the versions of the software as one JSON object."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version

import torch

PEERS = ("transformers", "liger-kernel", "litgpt", "torchtitan")
PACKAGES = ("torch", "triton", "numpy", *PEERS, "tokenizers", "pytest")
TOOLS = ("nvcc", "ncu", "compute-sanitizer", "gcc")


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the checkout, None where git or its folder is missing."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def main() -> None:
    cuda = torch.cuda.is_available()
    properties = torch.cuda.get_device_properties(0) if cuda else None
    facts = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "memory_gib": round(properties.total_memory / 2**30, 2) if cuda else None,
        "multiprocessors": properties.multi_processor_count if cuda else None,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "packages": {name: found for name in PACKAGES if (found := installed(name))},
        "tools": [name for name in TOOLS if shutil.which(name)],
        "cores": os.cpu_count(),
        "commit": commit(),
        "date": datetime.now().isoformat(timespec="seconds"),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
