"""The fields of multi-head latent attention (MLA), which are a part of the model's group
(`groups.py`), and the widths that follow from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

from megatron.config import needs
from megatron.config.metadata import NOT_NEGATIVE, model_flag, position_flag

LATENT = "--multi-latent-attention"
latent_flag = partial(model_flag, needs=LATENT)


@dataclass(frozen=True)
class LatentConfig:
    """latent attention"""

    multi_latent_attention: bool = model_flag(False)
    """Multi-head latent attention (MLA, DeepSeek-V2): keys and values are projected from one narrow
    vector of each token, and separate channels rotate."""
    q_lora_rank: int | None = latent_flag(None)
    """Width of the latent vector of queries. Default: queries come from the token itself."""
    kv_lora_rank: int = latent_flag(32)
    """Width of the latent vector of keys and values."""
    qk_head_dim: int = latent_flag(128)
    """Channels of a head's queries and keys that do not rotate."""
    qk_pos_emb_head_dim: int = latent_flag(64)
    """Channels of a head's queries and keys that rotate; keys share them over all heads."""
    v_head_dim: int = latent_flag(128)
    """Channels of a head's values."""
    rope_type: Literal["rope", "yarn"] | None = model_flag(None, idle_without=LATENT)
    """Rotary positions of latent attention. Default: yarn, as in Megatron-LM."""
    latent_norm_epsilon: float | None = latent_flag(None)
    """Epsilon of the latent vectors' norms. Default: norm-epsilon. Hugging Face's models have
    1e-6."""
    mscale: float = position_flag(1.0, bound=NOT_NEGATIVE, needs=(LATENT, needs.YARN))
    """YaRN: scale the rotary table by m(mscale) / m(mscale-all-dim); m(x) = 0.1 x ln(factor) +
    1."""
    mscale_all_dim: float = position_flag(0.0, bound=NOT_NEGATIVE, needs=(LATENT, needs.YARN))
    """YaRN: scale attention scores by m(mscale-all-dim)^2, see --mscale."""

    @property
    def rotary_width(self) -> int:
        """Channels of a head that rotate. Of a resolved configuration."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        channels = self.kv_channels * self.rotary_percent  # type: ignore[attr-defined]
        return int(channels) // 2 * 2

    @property
    def value_channels(self) -> int:
        """Channels of a head's values. Of a resolved configuration."""
        if self.multi_latent_attention:
            return self.v_head_dim
        return self.kv_channels  # type: ignore[attr-defined]

    @property
    def softmax_scale(self) -> float:
        """Of the attention scores. Of a resolved configuration."""
        scale: float = self.kv_channels**-0.5  # type: ignore[attr-defined]
        is_yarn = self.position_embedding_type == "yarn"  # type: ignore[attr-defined]
        if not (self.multi_latent_attention and is_yarn):
            return scale
        factor: float = self.rope_factor  # type: ignore[attr-defined]
        return scale * yarn_scale(factor, self.mscale_all_dim) ** 2


def yarn_scale(factor: float, weight: float) -> float:
    """YaRN's m(weight) where lengths grow by `factor`; 1 where they do not."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0
