"""The stages of scripts/gpu/*.sh as data, and what is predicted of their runs:

    python scripts/gpu/stages.py predict    # writes docs/results/gpu/predictions.json
    python scripts/gpu/stages.py list       # prints the scripts, their limits and their results
    python scripts/gpu/stages.py next       # prints the first script without a result

Predicted is what `tools/plan.py step` and its memory plan give for the command line of each run of
pretrain_gpt.py: the only prediction that a measurement is held against.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "gpu"
PREDICTIONS = RESULTS / "predictions.json"
# in the order to run
SCRIPTS = ("first", "settle", "peers", "memory", "features", "text", "faster")
PROGRAM = "pretrain_gpt.py"
HARDWARE = ("h100", "h200")  # a device whose name has it is held against its predictions


@dataclass(frozen=True)
class Stage:
    """One process of a script: its limit in seconds and its command."""

    name: str
    limit: int
    words: list[str]

    def flags(self) -> list[str] | None:
        """The flags of pretrain_gpt.py, None for another program."""
        if PROGRAM not in self.words:
            return None
        return self.words[self.words.index(PROGRAM) + 1 :]

    def ranks(self) -> int:
        return 2 if "torch.distributed.run" in self.words else 1


def stages_of(script: str, **environ: str) -> list[Stage]:
    """The stages of a script, in their order."""
    listing = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu" / f"{script}.sh")],
        env={**os.environ, "LIST": "1", "PYTHON": "python3", **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = (line.split("\t") for line in listing.stdout.splitlines())
    return [Stage(name, int(limit), words) for name, limit, *words in rows]


def predict(hardware: str, flags: list[str]) -> dict[str, Any]:
    """Step time, MFU and peak memory of one rank's run with these flags."""
    from megatron.tools._plan.hardware import load_hardware
    from megatron.tools._plan.memory import MemoryPlan
    from megatron.tools._plan.step_table import estimate
    from megatron.tools.plan import asked

    from megatron.config.validate import resolve

    config, vocab_size, ranks = asked([*flags, "--world-size", "1"])
    memory = MemoryPlan(resolve(config, ranks, vocab_size).config, vocab_size, ranks, "cuda")
    found = estimate(memory, load_hardware(hardware)).written()
    return {
        "step_s": round(found["step_s"], 4),
        "tokens_per_s": round(found["tokens_per_s_per_gpu"]),
        "mfu": round(found["mfu"], 4),
        "peak_gib": round(found["peak_gib"], 2),
    }


def predictions() -> dict[str, Any]:
    """Of every run of one rank, by hardware/script/stage."""
    rows = {
        f"{hardware}/{script}/{stage.name}": predict(hardware, stage.flags())
        for hardware in HARDWARE
        for script in SCRIPTS
        for stage in stages_of(script)
        if stage.flags() is not None and stage.ranks() == 1
    }
    return {"by": "tools/plan.py step --hardware NAME", "rows": rows}


def described(script: str) -> str:
    """A line about a script: its limit and its result."""
    limit = sum(stage.limit for stage in stages_of(script))
    path = RESULTS / f"{script}.json"
    state = "awaiting GPU"
    if path.exists():
        found = json.loads(path.read_text())
        failed = [name for name, run in found["runs"].items() if run.get("exit_code")]
        state = ", ".join(found.get(name, f"unknown {name}") for name in ("device", "date"))
        state += f"; failed: {', '.join(failed)}" if failed else ""
    return f"{script:9} at most {limit / 60:.1f} minutes; {state}"


def main(words: list[str]) -> int:
    if words == ["predict"]:
        RESULTS.mkdir(exist_ok=True)
        PREDICTIONS.write_text(json.dumps(predictions(), indent=1) + "\n")
        return 0
    if words == ["list"]:
        print("\n".join(map(described, SCRIPTS)))
        return 0
    if words == ["next"]:
        print(next((name for name in SCRIPTS if not (RESULTS / f"{name}.json").exists()), ""))
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
