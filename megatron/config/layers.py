"""What each layer of a model is made of: one record a layer, which everything else reads, and the
patterns of flags (`--moe-layer-freq [0]*3+[1]*58`) that choose some of the layers.
"""

from __future__ import annotations

import ast
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.config.errors import UserError

if TYPE_CHECKING:
    from megatron.config.model import ModelConfig

MOST_LAYERS = 10_000  # of a model; a pattern has no more


class LayerRecord(NamedTuple):
    """One transformer layer. Layers with equal records compute the same function of their weights.

    `window`: latest keys that a query sees, itself included; None: all earlier ones. `first` has
    the table of learned positions and the embedding's dropout, `last` the final norm.
    """

    latent: bool  # multi-head latent attention
    window: int | None
    rotary: bool
    experts: bool  # in place of the MLP
    first: bool
    last: bool


@functools.lru_cache(maxsize=256)
def layer_records(model: ModelConfig) -> tuple[LayerRecord, ...]:
    windowed, rotary = windowed_layers(model), rotary_layers(model)
    return tuple(
        LayerRecord(
            model.multi_latent_attention,
            model.window_size if windowed[index] else None,
            rotary[index],
            experts,
            index == 0,
            index == model.num_layers - 1,
        )
        for index, experts in enumerate(model.expert_layers())
    )


def windowed_layers(model: ModelConfig) -> tuple[bool, ...]:
    """Whether --window-size acts in each layer. Raises UserError."""
    has_window = model.window_size is not None
    full = _marked(model.window_attn_skip_freq, model.num_layers, mark=0)
    return tuple(has_window and not each for each in full)


def rotary_layers(model: ModelConfig) -> tuple[bool, ...]:
    """Whether positions rotate queries and keys in each layer. Raises UserError."""
    skipped = _marked(model.no_rope_freq, model.num_layers, mark=1)
    return tuple(model.is_rotary and not each for each in skipped)


def windows_of(model: ModelConfig) -> tuple[int | None, ...]:
    """The different windows of a model's layers, in the order of the layers."""
    return tuple(dict.fromkeys(record.window for record in layer_records(model)))


def widest_window(model: ModelConfig) -> int | None:
    """The window that every layer has; None where a layer sees all earlier keys."""
    return None if None in windows_of(model) else model.window_size


def _marked(text: str | None, layers: int, mark: int) -> tuple[bool, ...]:
    """The layers that a pattern leaves out: every N-th, or those with `mark`. Raises UserError."""
    found = [1 - mark] * layers if text is None else read_pattern(text, layers)
    if isinstance(found, int):
        return tuple((index + 1) % found == 0 for index in range(layers))
    return tuple(entry == mark for entry in found)


@functools.cache  # every layer asks for it
def expert_pattern(text: str, layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts, as --moe-layer-freq specifies. Raises UserError."""
    found = read_pattern(text, layers)
    if isinstance(found, int):
        return tuple(index % found == 0 for index in range(layers))
    if not any(found):
        raise UserError(f"{text!r}: no layer has experts; drop --num-experts, or give some a 1")
    return tuple(map(bool, found))


def read_pattern(text: str, layers: int) -> int | list[int]:
    """N, for every N-th layer, or a list of 0 and 1 for each layer. Raises UserError."""
    try:
        found = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError):
        raise UserError(
            f"{text!r} is neither a number nor a list of 0 and 1 such as [0]*3+[1]*58"
        ) from None
    if isinstance(found, int) and found < 1:
        raise UserError(f"{text!r}: give 1 or more, or a list of 0 and 1")
    if isinstance(found, list) and len(found) != layers:
        raise UserError(
            f"{text!r} has {len(found)} entries, and --num-layers is {layers}; make them equal"
        )
    return found


def _value(node: Any) -> Any:
    """Of a number, a list of 0 and 1, a list times a number, or a sum of lists."""
    match node:
        case ast.Constant() if type(node.value) is int:
            return node.value
        case ast.List():
            entries = [_value(entry) for entry in node.elts]
            if all(entry in (0, 1) for entry in entries):
                return entries
        case ast.BinOp(op=ast.Add()):
            left, right = _value(node.left), _value(node.right)
            are_lists = isinstance(left, list) and isinstance(right, list)
            if are_lists and len(left) + len(right) <= MOST_LAYERS:
                return left + right
        case ast.BinOp(op=ast.Mult()):
            factors = _value(node.left), _value(node.right)
            entries, times = sorted(factors, key=lambda factor: isinstance(factor, int))
            if len(entries) * times <= MOST_LAYERS:
                return entries * times
    raise ValueError
