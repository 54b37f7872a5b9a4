"""The check at start: each kernel variant that a run launches, computed once on this device in
small shapes and compared with its definition.

A child process (cases.py) computes, because an illegal address ends a CUDA context and a hang never
returns: either costs the operator it happened in, and another child continues after it. An alarm
ends a child that hangs. The parent itself does not touch the device. A result is remembered next to
Triton's own compiled kernels, by the text of the kernels, their configurations, the versions and
the device, so that only the first start after a change computes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import torch
from megatron.kernels import lang

HERE = Path(__file__).parent
START_LIMIT_S = 300  # until a child is ready: busy file systems import slowly
LIMIT_S = 120  # for each variant, compilation included
# The alarm keeps its default action, which also ends a process that hangs in a library.
COMMAND = (
    sys.executable,
    "-c",
    "import signal, sys; signal.signal(signal.SIGALRM, signal.SIG_DFL); "
    f"signal.alarm({START_LIMIT_S}); sys.path.insert(0, {str(HERE.parent)!r}); "
    "from megatron.kernels import cases; cases.main()",
)


@dataclass(frozen=True)
class Variant:
    """What a run launches of a row `kernel` of the table, in a precision. `settings` has what the
    launch's compilation depends on (training/kernel_variants.py); what it lacks is that of a row.
    """

    kernel: str
    dtype: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = (f"{name} {value}" for name, value in self.settings.items())
        return f"{self.kernel} ({', '.join((self.dtype, *given))})"


def faults(variants: Mapping[str, Sequence[Variant]], device: torch.device) -> dict[str, str]:
    """Operator -> what is wrong with the first of its variants that does not give its definition's
    result, or does not run; operators without a fault are absent.
    """
    waiting = [
        (operator, variant)
        for operator, each in variants.items()
        for variant in each
        if not _place(variant, device).exists()
    ]
    found: dict[str, str] = {}
    while waiting:
        lines, end = _lines_of_child([variant for _, variant in waiting], device)
        if not lines:
            fault = f"no kernel could be checked: {end}"
            return {operator: fault for operator, _ in waiting} | found
        answers = [json.loads(line)["fault"] for line in lines[1:]]
        for (operator, variant), answer in zip(waiting, answers):
            if answer:
                found.setdefault(operator, f"{variant}: {answer}")
        waiting = waiting[len(answers) :]
        if waiting:  # the child ended in the first of them
            operator, variant = waiting[0]
            found.setdefault(operator, f"{variant}: {end}")
            waiting = [each for each in waiting if each[0] not in found]
    return found


def _lines_of_child(variants: Sequence[Variant], device: torch.device) -> tuple[list[bytes], str]:
    """(what a process that computes the variants in order writes: a line when it is ready, and one
    for each variant; why lines are missing). The process remembers what passes.
    """
    request = {
        "device": str(device),
        "limit": LIMIT_S,
        "variants": [asdict(each) for each in variants],
        "files": [str(_place(each, device)) for each in variants],
    }
    with TemporaryFile() as stdin, TemporaryFile() as stdout, TemporaryFile() as log:
        stdin.write(json.dumps(request).encode())
        stdin.seek(0)
        # not a pipe, which a compiler that outlives the process would keep open
        code = subprocess.run(COMMAND, stdin=stdin, stdout=stdout, stderr=log).returncode
        stdout.seek(0)
        *lines, _unfinished = stdout.read().split(b"\n")
        if code == -signal.SIGALRM:
            return lines, f"no result after {LIMIT_S if lines else START_LIMIT_S} s"
        return lines, _reason(code, log)


def _reason(code: int, log: IO[bytes]) -> str:
    """How a process ended, with the last line that it logged."""
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"its process ended with {ended}" + (f": {lines[-1]}" if lines else "")


def _place(variant: Variant, device: torch.device) -> Path:
    """The file that exists when a variant has passed."""
    facts = (variant.kernel, variant.dtype, sorted(variant.settings.items()), *_versions(device))
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    return Path(lang.triton.knobs.cache.dir) / "megatron-checked" / digest


@cache
def _versions(device: torch.device) -> tuple[str, ...]:
    """All that a result depends on besides the variant."""
    text = hashlib.sha256()
    sources = (*HERE.glob("*.py"), *HERE.glob("candidates/*.py"), HERE / "configurations.json")
    for file in sorted(sources):
        text.update(file.read_bytes())
    return (
        torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        str(lang.capability(device)),
        torch.__version__,
        str(torch.version.cuda),
        lang.triton.__version__,
        text.hexdigest(),
    )


def remember(passed: Path) -> None:
    """Nodes that share a folder may do so at once; where it cannot be written, the next start
    checks again.
    """
    with contextlib.suppress(OSError):
        passed.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(passed, os.O_CREAT))
