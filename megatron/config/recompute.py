"""What of a layer is computed again or kept on the host: modules of --recompute-modules and
--offload-modules, and the words of --recompute-layers.

A word is WHAT*COUNT for COUNT consecutive layers (WHAT alone for one); WHAT is `none`, `full`, or
modules with + between them.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.errors import UserError

NONE, FULL = "none", "full"
MODULES = ("core_attn", "qkv", "mla_up_proj", "layernorm", "mlp_act", "mlp", "moe_act", "moe")
MOST = 10_000  # layers that one word may mean

# Modules whose inputs --activation-offload can keep on the host.
LAYER_INPUT = "layer_input"  # of a layer that is recomputed whole
INSIDE = tuple("attn_norm qkv_linear core_attn attn_proj mlp_norm mlp_fc1 mlp_act mlp_fc2".split())


def layer_words(words: Sequence[str]) -> list[str]:
    """WHAT of each layer, in order. Raises UserError with the word that is wrong."""
    found: list[str] = []
    for word in words:
        what, star, count = word.partition("*")
        parts = [] if what in (NONE, FULL) else what.split("+")
        unknown = [part for part in parts if part not in MODULES]
        if unknown:
            raise UserError(
                f"{word!r}: {unknown[0]!r} is none of {NONE}, {FULL}, {', '.join(MODULES)}; "
                "modules have + between them"
            )
        if star and not (count.isdecimal() and 0 < int(count) <= MOST):
            raise UserError(f"{word!r}: * must be followed by the number of layers, at least 1")
        found += [what] * (int(count) if star else 1)
    return found
