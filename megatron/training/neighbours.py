"""What else in the environment uses the name `megatron`, said once in the banner.

Called from training/banner.py.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import megatron


def megatron_core_lines() -> list[str]:
    """One line for the banner if the distribution megatron-core is installed, else none.

    It is a namespace package without megatron/__init__.py, so `import megatron` always finds this
    package; `megatron.core` is found as well only where both are installed in one folder.
    """
    try:
        version = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return []
    installed = (
        f"megatron-core {version} is installed in this environment; this run does not use it. "
    )
    if any((Path(folder) / "core").is_dir() for folder in megatron.__path__):
        return [installed + "Both share the folder `megatron`: `import megatron.core` works, too."]
    home = Path(megatron.__file__).parent
    return [
        installed + f"Here `import megatron` means {home}, so `import megatron.core` fails: "
        "run programs that need megatron-core in another environment."
    ]
