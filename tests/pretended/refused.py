"""Calls that a driver refuses, one fault in each: prints what the pretended driver answers, as
JSON.

    PRETENDED_LOG=FILE python tests/pretended/refused.py
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pretended import libraries

BF16 = 9  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
SWIZZLES = {"none": 0, "32 bytes": 1, "128 bytes": 3}
# a tensor map of [64, 128] elements of bf16 in blocks of [16, 64], and what is wrong with others
MAP: dict[str, Any] = {
    "address": 1 << 20,
    "sizes": (128, 64),
    "strides": (256,),
    "box": (64, 16),
    "steps": (1, 1),
    "swizzle": "128 bytes",
}
MAPS: dict[str, dict[str, Any]] = {
    "right": {},
    "address": {"address": (1 << 20) + 8},
    "stride": {"strides": (248,)},
    "stride too large": {"strides": (1 << 40,)},
    "size": {"sizes": (128, 0)},
    "box": {"box": (64, 257)},
    "inner dimension": {"box": (4, 16)},
    "swizzle": {"box": (64, 16), "swizzle": "32 bytes"},
    "element stride": {"steps": (1, 9)},
}
LAUNCH = {"x": 1, "y": 1, "z": 1, "threads": 128, "shared": 1024}
LAUNCHES = {
    "right": {},
    "grid in x": {"x": 2**31},
    "grid in y": {"y": 65536},
    "grid in z": {"z": 65536},
    "threads": {"threads": 1056},
    "shared memory": {"shared": 232449},
}


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "threads", "rows", "layers", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


def encode(driver: ctypes.CDLL, given: dict[str, Any]) -> int:
    """The driver's answer to a tensor map; 0 where it is accepted."""
    rank = len(given["sizes"])
    room = ctypes.create_string_buffer(256)
    place = (ctypes.addressof(room) + 127) // 128 * 128
    return driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        BF16,
        rank,
        ctypes.c_void_p(given["address"]),
        (ctypes.c_uint64 * rank)(*given["sizes"]),
        (ctypes.c_uint64 * (rank - 1))(*given["strides"]),
        (ctypes.c_uint32 * rank)(*given["box"]),
        (ctypes.c_uint32 * rank)(*given["steps"]),
        0,
        SWIZZLES[given["swizzle"]],
        0,
        0,
    )


def launch(driver: ctypes.CDLL, given: dict[str, int]) -> int:
    """The driver's answer to a launch."""
    function = ctypes.c_void_p()
    assert driver.cuModuleGetFunction(ctypes.byref(function), None, b"kernel") == 0
    config = LaunchConfig(**given, rows=1, layers=1)
    return driver.cuLaunchKernelEx(ctypes.byref(config), function, None, None)


def main() -> int:
    driver = ctypes.CDLL(str(libraries.driver()))
    maps = {name: encode(driver, MAP | fault) for name, fault in MAPS.items()}
    launches = {name: launch(driver, LAUNCH | fault) for name, fault in LAUNCHES.items()}
    print(json.dumps({"maps": maps, "launches": launches}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
