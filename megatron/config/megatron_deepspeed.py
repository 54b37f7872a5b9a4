"""Flags of other programs whose meaning depends on the rest of the line: the table `together` of
compatibility.toml. Most are of Megatron-DeepSpeed and its forks: lengths in tokens, and experts,
which are refused because their defaults differ from Megatron-LM's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

from megatron.config.compatibility import rows
from megatron.config.derive import spelled
from megatron.config.errors import UserError, collected
from megatron.config.input_files import read_json
from megatron.config.metadata import flag_name
from megatron.config.options import FIELDS, Words, key, shown
from megatron.config.reading import Reading

LENGTHS = ("--train-tokens", "--lr-decay-tokens", "--lr-warmup-tokens")
# Flags that only a script of Megatron-DeepSpeed has.
MARKS = {"--deepspeed", "--deepspeed-config", "--create-moe-param-group"}


def read_together(reading: Reading) -> None:
    """Add the settings that such flags mean to those of the other flags."""
    _take_tokenizer_of_load(reading)
    given = {key(flag): words for flag, words, row in reading.foreign if row.verdict == "together"}
    for name, function in FUNCTIONS.items():
        if name in given:
            words = given.pop(name)
            with collected(reading.faults, shown(name, words)):
                function(reading, words)
    lengths = {name: given.pop(name) for name in tuple(given) if name in LENGTHS}
    if lengths:
        with collected(reading.faults, ", ".join(lengths)):
            _take_lengths(reading, lengths)
    _refuse_experts(reading, list(given))


def _take_tokenizer_of_load(reading: Reading) -> None:
    """--patch-tokenizer-type names a tokenizer that --load holds."""
    folder, is_patch = reading.value("load"), reading.set_by.get("tokenizer_type", "")
    if folder and is_patch.startswith("--patch-") and reading.value("tokenizer_model") is None:
        reading.put("tokenizer_model", folder)
        reading.notes.append(f"--patch-tokenizer-type: the tokenizer is read from --load {folder}")


def _shard_optimizer(reading: Reading, words: Words) -> None:
    """--zero-stage 1, where the settings do not already give that much. Raises UserError."""
    stage = reading.value("zero_stage")
    if words:
        raise UserError("it takes no value")
    if stage == 0 and (written := reading.set_by.get("zero_stage")):
        raise UserError(f"contradicts {written}; drop one of them")
    reading.take("zero_stage", max(1, stage))


def _extend_vocabulary(reading: Reading, words: Words) -> None:
    """Rows in addition to a tokenizer.json's vocabulary without added tokens. Raises UserError."""
    if len(words) != 1 or not words[0].isdigit():
        raise UserError("expected a whole number of 0 or more")
    if int(words[0]) == 0:
        return
    tokenizer = reading.value("tokenizer_model")
    path = Path(tokenizer or "")
    path = path / "tokenizer.json" if os.path.isdir(path) else path
    try:
        rows = len(read_json(path)["model"]["vocab"]) + int(words[0])
    except (UserError, KeyError, TypeError) as error:
        raise UserError(
            f"adds to the vocabulary of --tokenizer-model {tokenizer}, which is not a "
            f"tokenizer.json ({error}); give --padded-vocab-size with all rows of the embedding"
        ) from None
    reading.put("padded_vocab_size", rows)


FUNCTIONS: dict[str, Callable[[Reading, Words], None]] = {
    "--use-distributed-optimizer": _shard_optimizer,
    "--extra-vocab-size": _extend_vocabulary,
}


def _take_lengths(reading: Reading, given: dict[str, Words]) -> None:
    """Lengths in tokens as lengths in samples. Where another length is given as well,
    Megatron-DeepSpeed ends at the shorter one, and decays by tokens. Raises UserError.
    """
    value, length = reading.value, reading.value("seq_length") or 0
    tokens = {name: _tokens(words) for name, words in given.items()}
    samples = _in_samples(reading, tokens)
    if length < 1:
        return  # which is a fault by itself
    # The end of the run, when its samples x length reach the tokens, and of its decay.
    ends = list(filter(None, (samples.get("train_samples"), value("train_samples"))))
    if ends and value("lr_decay_samples") is None:
        samples.setdefault("lr_decay_samples", max(ends))
    if tokens.get("--train-tokens"):
        ends.append(-(-tokens["--train-tokens"] // length))
    if ends:
        samples["train_samples"] = min(ends)
    for kind in ("decay", "warmup"):
        if f"--lr-{kind}-tokens" in tokens:
            samples[f"lr_{kind}_samples"] = round(tokens[f"--lr-{kind}-tokens"] / length)
    taken = " ".join(spelled(name, count) for name, count in samples.items())
    reading.notes.append(f"{', '.join(given)}: in samples of --seq-length {length}: {taken}")
    for name, count in samples.items():
        iters = name.replace("samples", "iters")
        reading.take(name, count)
        reading.take(iters, FIELDS[iters].default)


def _tokens(words: Words) -> int:
    given = " ".join(words)
    try:
        count = float(given)
    except ValueError:
        count = math.nan
    if not 0 <= count < math.inf:
        raise UserError(f"{given or 'no value'}: expected one number of 0 or more")
    return int(count)


def _in_samples(reading: Reading, tokens: dict[str, int]) -> dict[str, int]:
    """Given lengths in iterations, in samples. Raises UserError without a single batch size."""
    varies = reading.value("rampup_batch_size") or reading.value("step_batch_size_schedule")
    batch = None if varies else reading.value("global_batch_size")
    samples: dict[str, int] = {}
    for name in ("train_iters", "lr_warmup_iters", "lr_decay_iters"):
        length = reading.value(name)
        if not length or (name == "lr_decay_iters" and "--lr-decay-tokens" in tokens):
            continue
        if batch is None:
            raise UserError(
                f"{flag_name(name)} must be in samples, too, which needs a --global-batch-size of "
                "one size"
            )
        samples[name.replace("iters", "samples")] = length * batch
    return samples


def _refuse_experts(reading: Reading, given: list[str]) -> None:
    """A fault where flags of experts are given, or where only Megatron-DeepSpeed's defaults could
    be meant; these flags are in the scripts of dense models, too.
    """
    experts = reading.value("num_experts") or 1
    named = {key(flag) for flag, _, _ in reading.foreign} | set(reading.commands)
    is_ours = any(name.startswith("moe_") for name in reading.set_by)
    if experts == 1 and given:
        reading.notes.append(f"{', '.join(given)}: has no effect without --num-experts")
    elif experts > 1 and (given or (named & MARKS and not is_ours)):
        removed = f"; remove {', '.join(given)}" if given else ""
        reading.faults.append(f"--num-experts {experts}: {rows()['--topk'].text}{removed}")
