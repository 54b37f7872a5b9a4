"""The one place that chooses the device."""

from __future__ import annotations

import torch


def choose_device() -> torch.device:
    """The GPU when there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
