"""The installed commands of tools/: `mgpt_commands.plan` is `main` of `megatron.tools.plan`.

This module is outside of the package `megatron`: where another package of that name comes first,
a command names both folders instead of a module that is not found.
"""

import importlib
from collections.abc import Callable

import pretrain_gpt  # noqa: F401 (exits where another package `megatron` is found)


def __getattr__(name: str) -> Callable[[], int]:
    """The main function of a tool."""
    if name.startswith("_"):
        raise AttributeError(name)
    return importlib.import_module(f"megatron.tools.{name}").main
