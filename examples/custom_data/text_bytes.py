"""Pretrain on the bytes of a text file, without a tokenizer and without preprocessing."""

import sys
from dataclasses import dataclass, replace

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
from megatron.training.loop import train
from megatron.training.pretrain import start
from megatron.training.run import Run


@dataclass(frozen=True)
class TextBytes:
    """Reads samples of s + 1 bytes at random places of a file.

    The place is a function of seed and sample number alone: every rank, and every resumed run,
    reads the same sample number k.
    """

    content: np.ndarray
    seq_length: int
    seed: int

    def windows(self, sample: np.ndarray) -> np.ndarray:
        """[m] sample numbers -> [m, s + 1] token ids."""
        places = len(self.content) - self.seq_length
        first = mix(key_of(self.seed) + sample.astype(np.uint64)) % np.uint64(places)
        offsets = first.astype(np.int64)[:, None] + np.arange(self.seq_length + 1)
        return self.content[offsets].astype(np.int64)


def read_from(run: Run, reader: TextBytes) -> Run:
    """The run with this reader for training in place of the computed tokens."""
    source = replace(run.data.train, reader=reader)
    return replace(run, data=replace(run.data, train=source))


def main(path: str) -> int:
    config = Config(
        model=ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4),
        data=DataConfig(mock_data=True, vocab_size=256, seq_length=64),
        training=TrainingConfig(micro_batch_size=8, global_batch_size=8, train_iters=50),
        optimizer=OptimizerConfig(lr=1e-2, lr_decay_style="cosine", lr_warmup_iters=5),
        evaluation=EvaluationConfig(eval_iters=0),
        logging=LoggingConfig(log_interval=10),
    )
    content = np.fromfile(path, np.uint8)
    reader = TextBytes(content, config.data.seq_length, config.training.seed)
    with start(config) as run:
        return train(read_from(run, reader)).code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
