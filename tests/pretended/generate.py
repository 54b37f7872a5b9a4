"""tools/generate.py on the pretended device (device.py).

    python tests/pretended/generate.py --out FILE --load FOLDER

The checkpoint's weights are not read: fake tensors hold none. FILE gets the exit code or error, and
what made the host wait.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from pretended import libraries

if __name__ == "__main__":
    libraries.load_device_guard()  # before torch is imported

from pretended.device import pretended_device
from pretended.train import fake_parameters

TOKENS = 3


def run(folder: str) -> dict[str, Any]:
    from megatron.tools import generate

    from megatron.checkpoint.reader import Checkpoint

    words = ["--load", folder, "--prompt", "5 6 7", "--num-tokens", str(TOKENS), "--top-k", "4"]
    code, error = None, ""
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(pretended_device())
        stack.enter_context(fake_parameters())
        stack.enter_context(mock.patch.object(Checkpoint, "read", lambda *_: None))
        try:
            code = generate.main(words)
        except Exception:  # a test shows it
            error = traceback.format_exc()
    return {"code": code, "error": error, "waits": [wait.what for wait in log.waits]}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="generate on a pretended GPU")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--load", required=True)
    arguments = parser.parse_args(words)
    arguments.out.write_text(json.dumps(run(arguments.load)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
