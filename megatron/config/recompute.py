"""What is recomputed of each layer, written out: the words of --recompute-layers.

A word is WHAT*COUNT for COUNT consecutive layers (WHAT alone for one); WHAT is `none`, `full`, or
modules with + between them.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.errors import UserError

NONE, FULL = "none", "full"
MODULES = ("core_attn", "qkv", "mla_up_proj", "layernorm", "mlp_act", "mlp", "moe_act", "moe")
MOST = 10_000  # layers that one word may mean


def layer_words(words: Sequence[str]) -> list[str]:
    """WHAT of each layer, in order. Raises UserError with the word that is wrong."""
    found: list[str] = []
    for word in words:
        what, star, count = word.partition("*")
        unknown = [
            part for part in what.split("+") if part not in MODULES and what not in (NONE, FULL)
        ]
        if unknown:
            raise UserError(
                f"{word!r}: {unknown[0]!r} is none of {NONE}, {FULL}, {', '.join(MODULES)}; "
                "modules have + between them"
            )
        if star and not (count.isdecimal() and 0 < int(count) <= MOST):
            raise UserError(f"{word!r}: * must be followed by the number of layers, at least 1")
        found += [what] * (int(count) if star else 1)
    return found
