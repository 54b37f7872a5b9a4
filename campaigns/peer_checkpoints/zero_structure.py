"""How files of a real DeepSpeed folder differ from those that zero_cases.py writes for tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from megatron.tools._convert.pickles import Record, read_torch_file
from unit.checkpoint.zero_cases import KEYS, write_rank


def outline(content: dict[str, Any]) -> dict[str, str]:
    """The type of each entry."""
    return {
        key: value.kind.split(".")[-1] if isinstance(value, Record) else type(value).__name__
        for key, value in content.items()
    }


def contents(folder: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(file, kind, content) of the optimizer and model files of a folder."""
    for path in sorted(folder.glob("*.pt")):
        if path.name.startswith("layer_"):  # a pipeline's weights in bf16: nothing of them is read
            continue
        content = read_torch_file(path)
        if path.name.endswith("_model_states.pt"):
            # stage 1 leaves them out
            for name in ("frozen_param_shapes", "frozen_param_fragments"):
                content[name] = content[name] or {}
            left_out = ("args", "iteration", "module")
            yield path.name, "model", {k: v for k, v in content.items() if k not in left_out}
        else:
            assert set(content) == {"optimizer_state_dict", "ds_config", "ds_version"}
            state = content["optimizer_state_dict"]
            stage = str(state["zero_stage"].args[0]) if "zero_stage" in state else "bf16"
            yield path.name, "1" if stage == "2" else stage, state


def differences(root: Path) -> list[str]:
    """One line for each entry of a real folder whose type is another in those of tests."""
    wanted: dict[str, dict[str, str]] = {}
    with TemporaryDirectory() as name:
        for kind in KEYS:
            write_rank(Path(name, kind), [{"w": torch.ones(4)}], kind, 1)
            wanted |= {what: outline(content) for _, what, content in contents(Path(name, kind))}
    found = []
    for file, kind, content in contents(root / (root / "latest").read_text().strip()):
        given, ours = outline(content), wanted[kind]
        found += [
            f"{file}: {key} is {given.get(key)}, {ours.get(key)} in tests"
            for key in given | ours
            if given.get(key) != ours.get(key)
        ]
    return found
