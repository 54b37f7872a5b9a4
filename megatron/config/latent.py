"""The fields of multi-head latent attention (MLA), which are a part of the model's group
(`groups.py`), and the widths that follow from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megatron.config import needs
from megatron.config.metadata import NOT_NEGATIVE, POSITIVE, model_flag, position_flag


@dataclass(frozen=True)
class LatentConfig:
    """latent attention"""

    multi_latent_attention: bool = model_flag(False)
    """Multi-head latent attention (MLA, DeepSeek-V2): keys and values of all heads are made of one
    narrow vector of each token, and positions rotate separate channels. --qk-layernorm then
    normalizes that vector, and the queries' of --q-lora-rank.
    """
    q_lora_rank: int | None = model_flag(None, bound=POSITIVE, needs=needs.LATENT)
    """Width of the vector that a token's queries are made of. Default: they are made of the token
    itself.
    """
    kv_lora_rank: int = model_flag(32, bound=POSITIVE, needs=needs.LATENT)
    """Width of the vector that a token's keys and values are made of."""
    qk_head_dim: int = model_flag(128, bound=POSITIVE, needs=needs.LATENT)
    """Channels of a head's queries and keys that do not rotate."""
    qk_pos_emb_head_dim: int = model_flag(64, bound=POSITIVE, needs=needs.LATENT)
    """Channels of a head's queries and keys that rotate; those of the keys are the same for all
    heads.
    """
    v_head_dim: int = model_flag(128, bound=POSITIVE, needs=needs.LATENT)
    """Channels of a head's values."""
    rope_type: Literal["rope", "yarn"] | None = model_flag(None, needs=needs.LATENT_ROPE)
    """Rotary positions of latent attention: plain, or YaRN, which is the default as in Megatron-LM,
    also with --position-embedding-type rope or none.
    """
    latent_norm_epsilon: float | None = model_flag(
        None, megatron="one --norm-epsilon for all norms there", bound=POSITIVE, needs=needs.LATENT
    )
    """Epsilon of the latent vectors' norms. Default: norm-epsilon. Hugging Face's families of
    latent attention have 1e-6 whatever the other norms have.
    """
    mscale: float = position_flag(1.0, bound=NOT_NEGATIVE, needs=(needs.LATENT, needs.YARN))
    """YaRN: the rotary table is multiplied by m(mscale) / m(mscale-all-dim), where m(x) is
    0.1 x ln(--rope-scaling-factor) + 1.
    """
    mscale_all_dim: float = position_flag(0.0, bound=NOT_NEGATIVE, needs=(needs.LATENT, needs.YARN))
    """YaRN: attention scores are multiplied by m(mscale-all-dim)^2, see --mscale."""

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
