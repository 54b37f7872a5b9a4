"""Flags of other programs whose meaning depends on other flags of the line: the tables `at_least`
and `together` of compatibility.toml. Most are Megatron-DeepSpeed's: lengths in tokens, and its
mixture of experts with defaults that differ from Megatron-LM's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron.config.compatibility import CompatibilityRow
from megatron.config.derive import spelled
from megatron.config.errors import UserError
from megatron.config.metadata import flag_name
from megatron.config.named_files import extended_vocabulary
from megatron.config.options import Words, key, options_by_flag, shown
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
    for flag, words, row in reading.foreign:
        if row.verdict == "at_least":
            _raise(reading, flag, words, row)
    given = {key(flag): words for flag, words, row in reading.foreign if row.verdict == "together"}
    _read_tokenizer(reading, given.pop("--extra-vocab-size", ["0"]))
    lengths = [name for name in given if name in LENGTHS]
    is_deepspeed = any(key(flag) == "--deepspeed" for flag, _, _ in reading.foreign)
    is_ours = any(name.startswith("moe_") for name in reading.chosen)
    has_experts = (reading.value("num_experts") or 1) > 1
    together = Together(given, reading)
    values = together.lengths(lengths) if lengths else {}
    if len(given) > len(lengths) or (is_deepspeed and not is_ours and has_experts):
        values |= together.experts([name for name in given if name not in LENGTHS])
    for name, value in values.items():
        reading.take(name, value)


def _raise(reading: Reading, flag: str, words: Words, row: CompatibilityRow) -> None:
    """Raise a setting that is below what a flag asks for at least."""
    try:
        ((ours, least),) = row.rewrite(words)
    except UserError as problem:
        reading.faults.append(f"{shown(flag, words)}: {problem}")
        return
    option, _ = options_by_flag()[key(ours)]
    value, field = option.parse(least), option.field
    is_below = reading.value(field) < value and option.names[0] not in reading.unsure
    if is_below and field in reading.set_by:
        reading.faults.append(f"{flag}: contradicts {reading.set_by[field]}; drop one of them")
    else:
        reading.take(field, value if is_below else reading.value(field))


def _read_tokenizer(reading: Reading, extra: Words) -> None:
    """The tokenizer that --load holds, and the rows that are added to its vocabulary."""
    if reading.set_by.get("tokenizer_type", "").startswith("--patch-"):
        folder = reading.value("load")
        if reading.value("tokenizer_model") is None and folder:
            reading.config = reading.config.with_fields("data", tokenizer_model=folder)
            reading.notes.append(
                f"--patch-tokenizer-type: the tokenizer is read from --load {folder}"
            )
    try:
        padded = extended_vocabulary(extra, reading.value("tokenizer_model"))
        if padded is not None:
            reading.config = reading.config.with_fields("model", padded_vocab_size=padded)
    except UserError as problem:
        reading.faults.append(f"{shown('--extra-vocab-size', extra)}: {problem}")


@dataclass
class Together:
    """Such flags, each with the words after it, and the settings that they act with."""

    given: dict[str, Words]
    reading: Reading

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

    def lengths(self, names: list[str]) -> dict[str, Any]:
        """Lengths in tokens as lengths in samples. Where another length is given as well,
        Megatron-DeepSpeed ends at the shorter one, and decays by tokens.
        """
        reading, faults = self.reading, len(self.reading.faults)
        tokens = {name: int(self._number(name, 0)) for name in names}
        length = reading.value("seq_length")
        if len(reading.faults) > faults or not length or length < 1:
            return {}
        values = self._in_samples(", ".join(names), tokens)
        ends = [values.get("train_samples"), reading.value("train_samples")]
        whole = max((end for end in ends if end), default=None)
        if "--train-tokens" in tokens:
            # consumed samples x length reaches the tokens with this many samples
            ends.append(-(-tokens["--train-tokens"] // length))
        values["train_samples"] = min((end for end in ends if end), default=None)
        if whole and reading.value("lr_decay_samples") is None:
            values.setdefault("lr_decay_samples", whole)
        for kind in ("decay", "warmup"):
            if f"--lr-{kind}-tokens" in tokens:
                values[f"lr_{kind}_samples"] = round(tokens[f"--lr-{kind}-tokens"] / length)
        if len(reading.faults) > faults:
            return {}
        flags = " ".join(
            spelled(name, value)
            for name, value in values.items()
            if name.endswith("samples") and value is not None
        )
        reading.notes.append(f"{', '.join(names)}: in samples of --seq-length {length}: {flags}")
        return values

    def _in_samples(self, names: str, tokens: dict[str, int]) -> dict[str, Any]:
        """The lengths in iterations that are given, in samples. Batches of several sizes have none
        to do it with.
        """
        value = self.reading.value
        varies = value("rampup_batch_size") or value("step_batch_size_schedule")
        batch = None if varies else value("global_batch_size")
        lengths = {
            name: value(name)
            for name in ("train_iters", "lr_warmup_iters", "lr_decay_iters")
            if value(name) and not (name == "lr_decay_iters" and "--lr-decay-tokens" in tokens)
        }
        if lengths and batch is None:
            self._fault(
                f"{names}: {', '.join(map(flag_name, lengths))} must be in samples, too, which "
                "needs a --global-batch-size of one size"
            )
        values: dict[str, Any] = {"lr_decay_iters": None}
        for name, count in lengths.items():
            values[name] = 0 if name == "lr_warmup_iters" else None
            values[name.replace("iters", "samples")] = count * (batch or 0)
        return values

    def experts(self, names: list[str]) -> dict[str, Any]:
        """Megatron-DeepSpeed's experts: top-1 with the softmax over all logits, in every second
        layer, each with a capacity, unless flags specify otherwise.
        """
        given, model = self.given, self.reading.config.model
        if (model.num_experts or 1) <= 1:
            self.reading.notes.append(f"{', '.join(names)}: has no effect without --num-experts")
            return {}
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
        interval = int(self._number("--expert-interval", 2))
        if interval > (model.num_layers or interval):
            self._fault(
                f"--expert-interval {interval}: must be at most --num-layers {model.num_layers}"
            )
        elif model.num_layers and interval > 0:
            values["moe_layer_freq"] = _every(interval, model.num_layers)
        values["moe_aux_loss_coeff"] = (self._number("--moe-loss-coeff", 0.1),)
        tp = self.reading.value("tensor_model_parallel_size")
        if tp > 1 and "--enable-expert-tensor-parallelism" not in given:
            values["expert_tensor_parallel_size"] = 1
        if "--disable-moe-token-dropping" not in given and (factor := self._capacity(topk)):
            values["moe_expert_capacity_factor"] = factor
        return self._unchosen(values)

    def _capacity(self, topk: int) -> float:
        """The tokens that an expert takes. Evaluation has the same capacity as training here, and
        none has a least one: both must not matter.
        """
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
        if tokens and math.ceil(share * factor) < least:
            self._fault(
                f"--moe-min-capacity {least:g}: an expert's capacity of "
                f"{math.ceil(share * factor)} tokens is below it; give "
                f"--moe-train-capacity-factor {least / share:g} or more"
            )
        drawn = "drawn at random" if topk == 1 else "chosen by their place"
        if topk <= 2:
            self.reading.notes.append(
                f"--moe-train-capacity-factor {factor:g}: the tokens that an expert drops are "
                f"{drawn} in DeepSpeed; here those with the smallest weights are "
                "(--moe-token-drop-policy)"
            )
        return factor

    def _unchosen(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values of fields that the user did not choose by our own flags. A flag that
        contradicts is a fault; a default of Megatron-DeepSpeed gives way.
        """
        chosen = self.reading.chosen
        for name, flag in SETS.items():
            ours = self.reading.value(name)
            if name in values and name in chosen and flag in self.given and ours != values[name]:
                written = " ".join([flag, *self.given[flag]])
                self._fault(f"{written}: contradicts {spelled(name, ours)}; remove one of them")
        taken = {name: value for name, value in values.items() if name not in chosen}
        flags = " ".join(spelled(*each) for each in taken.items())
        self.reading.notes.append(f"Megatron-DeepSpeed's experts: {flags}")
        return taken


def _every(interval: int, layers: int) -> str:
    """--moe-layer-freq of a pattern whose groups of `interval` layers end with one of experts."""
    if interval == 1:
        return "1"
    pattern = f"([0]*{interval - 1}+[1])*{layers // interval}"
    return pattern + (f"+[0]*{layers % interval}" if layers % interval else "")
