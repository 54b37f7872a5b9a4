"""What the plan has no bytes and seconds for: who asks is told so, instead of being given those of
another model.

Called from training/banner.py, training/out_of_memory.py, plan/recompute.py and tools/plan.py.
"""

from __future__ import annotations

from megatron.config.errors import UserError
from megatron.config.groups import Config


def unplanned(config: Config) -> str | None:
    """Why memory and time of this model are not planned; None where they are. Parameters, FLOPs and
    checkpoints are exact for every model.
    """
    if config.model.multi_latent_attention:
        return "activations of --multi-latent-attention are not planned"
    return None


def check_planned(config: Config) -> None:
    """Raises UserError where `unplanned` has a reason."""
    if reason := unplanned(config):
        raise UserError(f"{reason}: there is no plan of memory and time for this model")
