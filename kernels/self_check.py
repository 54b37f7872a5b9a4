"""The check at start: each kernel variant that a run launches, computed once on this device in
small shapes and compared with its definition.

A child process (cases.py) computes, because an illegal address ends a CUDA context and a hang never
returns: either costs the operator it happened in, and another child continues after it. The parent
itself does not touch the device. A result is remembered next to Triton's own compiled kernels, by
the text of the kernels, their configurations, the versions and the device, so that only the first
start after a change computes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from subprocess import PIPE
from typing import IO, Any

import torch
from megatron.kernels import lang

HERE = Path(__file__).parent
COMMAND = (
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {str(HERE.parent)!r}); "
    "from megatron.kernels import cases; cases.main()",
)
START_LIMIT_S = 300.0  # until a child is ready: busy file systems import slowly
LIMIT_S = 120.0  # for each variant, compilation included


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
    for each variant; why lines are missing). It is killed when it is silent for too long. What
    passes is remembered.
    """
    request = {"device": str(device), "variants": [asdict(each) for each in variants]}
    lines: list[bytes] = []
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as log:
        stdin.write(json.dumps(request).encode())
        stdin.seek(0)
        # without a buffer, in which poll would not see a line
        process = subprocess.Popen(COMMAND, bufsize=0, stdin=stdin, stdout=PIPE, stderr=log)
        with process:
            poll = select.poll()
            poll.register(process.stdout, select.POLLIN)
            try:
                for limit in (START_LIMIT_S, *(LIMIT_S for _ in variants)):
                    if not poll.poll(1000 * limit):
                        return lines, f"no result after {limit:g} s"
                    line = process.stdout.readline()
                    if not line.endswith(b"\n"):
                        return lines, _reason(process, log)
                    # at once: a collective of another rank may time out and end this process
                    if lines and not json.loads(line)["fault"]:
                        _remember(_place(variants[len(lines) - 1], device))
                    lines.append(line)
            finally:
                process.kill()
    return lines, ""


def _reason(process: subprocess.Popen, log: IO[bytes]) -> str:
    """How a process ended, with the last line that it logged."""
    code = process.wait()
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


def _remember(passed: Path) -> None:
    """Nodes that share a folder may do so at once; where it cannot be written, the next start
    checks again.
    """
    with contextlib.suppress(OSError):
        passed.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(passed, os.O_CREAT))
