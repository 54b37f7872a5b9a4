"""The installed commands of tools/: `mgpt_commands.plan` is `main` of `megatron.tools.plan`.

This module is outside of the package `megatron`, so that it can check which package of that name
Python finds.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import megatron

_ours = Path(__file__).resolve().with_name("megatron")
if _ours not in (Path(folder).resolve() for folder in megatron.__path__):
    sys.exit(
        f"`import megatron` finds {', '.join(megatron.__path__)}, another package, and not {_ours} "
        "(megatron-gpt-pretrain): two packages named megatron cannot share an environment; remove "
        "the other one from PYTHONPATH, or use one environment for each"
    )


def __getattr__(name: str) -> Callable[[], int]:
    """The main function of a tool."""
    if name.startswith("_"):
        raise AttributeError(name)
    return importlib.import_module(f"megatron.tools.{name}").main
