"""Which module knows a model's family of Hugging Face: the families of one projection for queries,
keys and values (`huggingface.py`), and that of latent attention (`deepseek.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron.config.groups import ModelConfig
from megatron.config.input_files import JsonObject
from megatron.interop import deepseek, huggingface
from megatron.interop.huggingface import Rule


def to_huggingface(model: ModelConfig, vocab_size: int) -> tuple[JsonObject, list[Rule]]:
    """config.json of a resolved `model` with the real vocabulary, and how each of its tensors is
    made of ours. Raises UserError naming every flag that Hugging Face's models cannot express.
    """
    latent = model.multi_latent_attention
    write = deepseek.to_deepseek if latent else huggingface.to_huggingface
    return write(model, vocab_size)


def from_huggingface(config: JsonObject, names: Iterable[str]) -> tuple[JsonObject, list[Rule]]:
    """Fields of a resolved ModelConfig, and what each of the tensors called `names` holds. Raises
    UserError for what has no counterpart here, naming all of it.
    """
    latent = config.get("model_type") == deepseek.KIND
    read = deepseek.from_deepseek if latent else huggingface.from_huggingface
    return read(config, names)


def left_out(config: JsonObject, names: Iterable[str]) -> tuple[str, ...]:
    """Lines about tensors of a model that `from_huggingface` takes and leaves out."""
    if config.get("model_type") != deepseek.KIND:
        return ()
    lines = huggingface.some_names(
        "note: tensors of multi-token prediction, which are not taken over",
        deepseek.predicting(config, names),
    )
    return tuple(lines)
