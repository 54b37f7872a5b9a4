"""Pretrain on the bytes of a text file, without a tokenizer and without preprocessing."""

import hashlib
import sys
from dataclasses import dataclass

import numpy as np

from megatron.config.groups import (
    Config,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from megatron.data.token_stream import key_of, mix
from megatron.training.pretrain import pretrain


@dataclass(frozen=True)
class TextBytes:
    """Reads samples of s + 1 bytes at random places of a file.

    The place is a function of seed and sample number alone: every rank, and every resumed run,
    reads the same sample number k.
    """

    content: np.ndarray
    seq_length: int
    seed: int

    @property
    def identity(self) -> str:
        """A name for these samples in this order: a resume refuses to go on with others."""
        return f"{hashlib.sha256(self.content).hexdigest()[:16]}, seed {self.seed}"

    def windows(self, sample: np.ndarray) -> np.ndarray:
        """[m] sample numbers -> [m, s + 1] token ids."""
        places = len(self.content) - self.seq_length
        first = mix(key_of(self.seed) + sample.astype(np.uint64)) % np.uint64(places)
        offsets = first.astype(np.int64)[:, None] + np.arange(self.seq_length + 1)
        return self.content[offsets].astype(np.int64)


def main(path: str) -> int:
    config = Config(
        model=ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4),
        data=DataConfig(mock_data=True, vocab_size=256, seq_length=64),
        training=TrainingConfig(micro_batch_size=4, global_batch_size=8, train_iters=50),
        optimizer=OptimizerConfig(lr=1e-2, lr_decay_style="cosine", lr_warmup_iters=5),
        evaluation=EvaluationConfig(eval_iters=0),
        logging=LoggingConfig(log_interval=10),
    )
    content = np.fromfile(path, np.uint8)
    reader = TextBytes(content, config.data.seq_length, config.training.seed)
    return pretrain(config, reader=reader)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
