"""How long a run is: iterations, samples, tokens, and how often it reads its data.

Called from training/banner.py.
"""

from __future__ import annotations

from megatron.config.groups import Config
from megatron.data.loader import Data, FileReader
from megatron.model.arithmetic import iterations_for, samples_after

# repeated data is worth as much as new data up to about here: Muennighoff et al. 2023, arXiv
# 2305.16264
MOST_EPOCHS = 4


def run_length(config: Config) -> tuple[int, int]:
    """Iterations of a run, and the samples that they consume, through the ramp-up of the batch
    size.
    """
    training = config.training
    iterations = training.train_iters
    if iterations is None:
        iterations = iterations_for(training.train_samples, config)
    return iterations, samples_after(iterations, config)


def length_line(config: Config) -> str:
    """One line for the banner."""
    iterations, samples = run_length(config)
    return (
        f"{iterations:,} iterations, {samples:,} samples, "
        f"{samples * config.data.seq_length:,} tokens in all"
    )


def epoch_lines(config: Config, data: Data) -> list[str]:
    """A line for each training source: how many times the run reads it; a warning above
    MOST_EPOCHS.
    """
    if data.train is None or not isinstance(data.train.reader, FileReader):
        return []
    _, samples = run_length(config)
    # Blends are exact in samples, so the number of epochs of each source is known in advance.
    reader, lines = data.train.reader, []
    if samples < reader.blend.first_sample:
        return []
    for stream, index in zip(reader.streams, reader.blend.indices_at(samples), strict=True):
        epochs = index / stream.samples
        text = (
            f"train: {stream.dataset.prefix}: read {epochs:.3g} times in this run "
            f"({epochs:.3g} epochs)"
        )
        lines.append(
            f"warning: {text}; more than {MOST_EPOCHS} epochs teach little more"
            if epochs > MOST_EPOCHS
            else text
        )
    return lines
