"""Flags of other programs whose meaning depends on the rest of the line: the table `together` of
compatibility.toml. Most are of Megatron-DeepSpeed and its forks: lengths in tokens, and a mixture
of experts with defaults that differ from Megatron-LM's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.derive import spelled
from megatron.config.errors import UserError, collected
from megatron.config.input_files import read_json
from megatron.config.metadata import flag_name
from megatron.config.options import FIELDS, Words, key, shown
from megatron.config.reading import Reading

LENGTHS = ("--train-tokens", "--lr-decay-tokens", "--lr-warmup-tokens")
# Field -> the flag of Megatron-DeepSpeed that sets it.
SETS = {
    "moe_router_topk": "--topk",
    "moe_layer_freq": "--expert-interval",
    "moe_aux_loss_coeff": "--moe-loss-coeff",
    "moe_expert_capacity_factor": "--moe-train-capacity-factor",
}


def read_together(reading: Reading) -> None:
    """Add the settings that such flags mean to those of the other flags.

    A line with --deepspeed and a plain --num-experts has Megatron-DeepSpeed's defaults, too.
    """
    # 1. Flags that mean something each by itself.
    _take_tokenizer_of_load(reading)
    given = {key(flag): words for flag, words, row in reading.foreign if row.verdict == "together"}
    for name, function in FUNCTIONS.items():
        if name in given:
            words = given.pop(name)
            with collected(reading.faults, shown(name, words)):
                function(reading, words)
    # 2. Lengths in tokens, and experts.
    together = Together(given, reading)
    lengths = [name for name in given if name in LENGTHS]
    if lengths:
        together.take_lengths(lengths)
    named = {key(flag) for flag, _, _ in reading.foreign} | set(reading.commands)
    is_deepspeed = not named.isdisjoint(("--deepspeed", "--deepspeed-config"))
    is_ours = any(name.startswith("moe_") for name in reading.set_by)
    others = [name for name in given if name not in LENGTHS]
    if others and not together.has_experts:
        reading.notes.append(f"{', '.join(others)}: has no effect without --num-experts")
    elif together.has_experts and (others or (is_deepspeed and not is_ours)):
        together.take_experts()


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


@dataclass
class Together:
    """Such flags, each with its words, and the settings that they act with."""

    given: dict[str, Words]
    reading: Reading

    @property
    def has_experts(self) -> bool:
        return (self.reading.value("num_experts") or 1) > 1

    def _fault(self, text: str) -> None:
        self.reading.faults.append(text)

    def _number(self, name: str, default: float) -> float:
        """The one number after a flag, or its default; a fault for anything else."""
        words = self.given.get(name, [str(default)])
        try:
            value = float(" ".join(words))
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            self._fault(f"{' '.join([name, *words])}: expected one number of 0 or more")
            return default
        return value

    def take_lengths(self, names: list[str]) -> None:
        """Lengths in tokens as lengths in samples. Where another length is given as well,
        Megatron-DeepSpeed ends at the shorter one, and decays by tokens.
        """
        value, faults = self.reading.value, len(self.reading.faults)
        length, flags = value("seq_length") or 0, ", ".join(names)
        tokens = {name: int(self._number(name, 0)) for name in names}
        samples = self._in_samples(flags, tokens)
        if len(self.reading.faults) > faults or length < 1:
            return
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
        self.reading.notes.append(f"{flags}: in samples of --seq-length {length}: {taken}")
        for name, count in samples.items():
            iters = name.replace("samples", "iters")
            self.reading.take(name, count)
            self.reading.take(iters, FIELDS[iters].default)

    def _in_samples(self, flags: str, tokens: dict[str, int]) -> dict[str, int]:
        """Given lengths in iterations, in samples; a fault without a single batch size."""
        value = self.reading.value
        varies = value("rampup_batch_size") or value("step_batch_size_schedule")
        batch = None if varies else value("global_batch_size")
        samples: dict[str, int] = {}
        for name in ("train_iters", "lr_warmup_iters", "lr_decay_iters"):
            if not value(name) or (name == "lr_decay_iters" and "--lr-decay-tokens" in tokens):
                continue
            if batch is None:
                self._fault(
                    f"{flags}: {flag_name(name)} must be in samples, too, which needs a "
                    "--global-batch-size of one size"
                )
            samples[name.replace("iters", "samples")] = value(name) * (batch or 0)
        return samples

    def take_experts(self) -> None:
        """Megatron-DeepSpeed's defaults of experts: top-1, every second layer, with a capacity."""
        given, value = self.given, self.reading.value
        if given.get("--mlp-type", ["standard"]) != ["standard"]:
            self._fault(
                "--mlp-type residual: a dense MLP whose sum with the experts is learned is not "
                "supported; use --moe-shared-expert-intermediate-size with --moe-shared-expert-gate"
            )
        topk = int(self._number("--topk", 1))
        values: dict[str, Any] = {"moe_router_topk": topk}
        if topk == 1:
            values["moe_router_pre_softmax"] = True
        if topk == 2 and "--disable-moe-top2-2nd-expert-sampling" not in given:
            self._fault(
                "--topk 2: DeepSpeed draws the second expert at random, which is not supported; "
                "add --disable-moe-top2-2nd-expert-sampling, which takes the second best"
            )
        interval, layers = int(self._number("--expert-interval", 2)), value("num_layers") or 0
        if 0 < layers < interval:
            self._fault(f"--expert-interval {interval}: must be at most --num-layers {layers}")
        elif layers and interval > 0:
            values["moe_layer_freq"] = _every(interval, layers)
        values["moe_aux_loss_coeff"] = (self._number("--moe-loss-coeff", 0.1),)
        is_tensor_parallel = value("tensor_model_parallel_size") > 1
        if is_tensor_parallel and "--enable-expert-tensor-parallelism" not in given:
            values["expert_tensor_parallel_size"] = 1
        if "--disable-moe-token-dropping" not in given and (factor := self._capacity(topk)):
            values["moe_expert_capacity_factor"] = factor
        self._take_unchosen(values)

    def _capacity(self, topk: int) -> float:
        """The tokens of an expert; evaluation's capacity and a least one must not matter."""
        value = self.reading.value
        factor = self._number("--moe-train-capacity-factor", 1.0)
        at_evaluation = self._number("--moe-eval-capacity-factor", 1.0)
        least = self._number("--moe-min-capacity", 4)
        if factor != at_evaluation and value("eval_iters"):
            self._fault(
                f"--moe-eval-capacity-factor {at_evaluation:g}: evaluation takes the capacity of "
                f"training; give both as {factor:g}, or --eval-iters 0"
            )
        tokens = (value("micro_batch_size") or 0) * (value("seq_length") or 0)
        share = tokens * topk / value("num_experts")
        capacity = math.ceil(share * factor)
        if tokens and capacity < least:
            self._fault(
                f"--moe-min-capacity {least:g}: an expert's capacity of {capacity} tokens is below "
                f"it; give --moe-train-capacity-factor {least / share:g} or more"
            )
        return factor

    def _take_unchosen(self, values: dict[str, Any]) -> None:
        """Take values that no flag of ours chose; a flag that contradicts ours is a fault."""
        reading, taken = self.reading, []
        for name, value in values.items():
            flag, ours = SETS.get(name), reading.value(name)
            if name not in reading.set_by:
                reading.take(name, value)
                taken.append(spelled(name, value))
            elif flag in self.given and ours != value:
                written = " ".join([flag, *self.given[flag]])
                self._fault(f"{written}: contradicts {spelled(name, ours)}; remove one of them")
        reading.notes.append(f"Megatron-DeepSpeed's experts: {' '.join(taken)}")


def _every(interval: int, layers: int) -> str:
    """--moe-layer-freq of a pattern whose groups of `interval` layers end with one of experts."""
    if interval == 1:
        return "1"
    rest = f"+[0]*{layers % interval}" if layers % interval else ""
    return f"([0]*{interval - 1}+[1])*{layers // interval}{rest}"
