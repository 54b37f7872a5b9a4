"""Flags of Megatron-DeepSpeed whose meaning depends on other flags of the line: lengths in tokens,
and its mixture of experts with defaults that differ from Megatron-LM's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from megatron.config.derive import GROUP_OF, spelled
from megatron.config.groups import Config
from megatron.config.metadata import flag_name

Given = dict[str, list[str]]  # flag -> the words after it

LENGTHS = ("--train-tokens", "--lr-decay-tokens", "--lr-warmup-tokens")
# Field -> the flag of Megatron-DeepSpeed that sets it.
SETS = {
    "moe_router_topk": "--topk",
    "moe_layer_freq": "--expert-interval",
    "moe_aux_loss_coeff": "--moe-loss-coeff",
    "moe_expert_capacity_factor": "--moe-train-capacity-factor",
}


def translate(given: Given, config: Config, chosen: set[str], *, is_deepspeed: bool) -> Translation:
    """The settings that `given` means in addition to those of `config`, of which the user chose
    the fields `chosen`. `is_deepspeed`: the line holds --deepspeed, so that a plain --num-experts
    has Megatron-DeepSpeed's defaults, too.
    """
    result = Translation(given, config)
    lengths = [name for name in given if name in LENGTHS]
    ours = any(name.startswith("moe_") for name in chosen)
    if lengths:
        result.lengths(lengths)
    if len(given) > len(lengths) or (
        is_deepspeed and not ours and (config.model.num_experts or 1) > 1
    ):
        result.experts([name for name in given if name not in LENGTHS], chosen)
    return result


@dataclass
class Translation:
    """Settings that flags mean, notes about them for the banner, and faults."""

    given: Given
    config: Config
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def _number(self, name: str, default: float) -> float:
        """The one number after a flag, or its default; a fault for anything else."""
        words = self.given.get(name, [str(default)])
        try:
            value = float(" ".join(words))
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            self.faults.append(f"{' '.join([name, *words])}: expected one number of 0 or more")
            return default
        return value

    def lengths(self, names: list[str]) -> None:
        """A length in tokens is converted to a length in samples. Where another length is given
        as well, Megatron-DeepSpeed ends at the shorter one, and decays by tokens.
        """
        length, optimizer = self.config.data.seq_length, self.config.optimizer
        tokens = {name: int(self._number(name, 0)) for name in names}
        if self.faults or not length or length < 1:
            return
        values = self._in_samples(", ".join(names), tokens)
        ends = [values.get("train_samples"), self.config.training.train_samples]
        whole = max((end for end in ends if end), default=None)
        if "--train-tokens" in tokens:
            # consumed samples x length reaches the tokens with this many samples
            ends.append(-(-tokens["--train-tokens"] // length))
        values["train_samples"] = min((end for end in ends if end), default=None)
        if whole and optimizer.lr_decay_samples is None:
            values.setdefault("lr_decay_samples", whole)
        for kind in ("decay", "warmup"):
            if f"--lr-{kind}-tokens" in tokens:
                values[f"lr_{kind}_samples"] = round(tokens[f"--lr-{kind}-tokens"] / length)
        if self.faults:
            return
        self.values |= values
        shown = " ".join(
            spelled(name, value)
            for name, value in values.items()
            if name.endswith("samples") and value is not None
        )
        self.notes.append(f"{', '.join(names)}: in samples of --seq-length {length}: {shown}")

    def _in_samples(self, shown: str, tokens: dict[str, int]) -> dict[str, Any]:
        """The lengths in iterations that are given, in samples. Batches of several sizes have none
        to do it with.
        """
        training, optimizer = self.config.training, self.config.optimizer
        varies = training.rampup_batch_size or training.step_batch_size_schedule
        batch = None if varies else training.global_batch_size
        decay = None if "--lr-decay-tokens" in tokens else optimizer.lr_decay_iters
        lengths = {
            "train_iters": training.train_iters,
            "lr_warmup_iters": optimizer.lr_warmup_iters,
            "lr_decay_iters": decay,
        }
        lengths = {name: count for name, count in lengths.items() if count}
        if lengths and batch is None:
            self.faults.append(
                f"{shown}: {', '.join(map(flag_name, lengths))} must be in samples, too, which "
                "needs a --global-batch-size of one size"
            )
        values: dict[str, Any] = {"lr_decay_iters": None}
        for name, count in lengths.items():
            values[name] = 0 if name == "lr_warmup_iters" else None
            values[name.replace("iters", "samples")] = count * (batch or 0)
        return values

    def experts(self, names: list[str], chosen: set[str]) -> None:
        """Megatron-DeepSpeed's experts: top-1 with the softmax over all logits, in every second
        layer, each with a capacity, unless flags specify otherwise.
        """
        given, model = self.given, self.config.model
        if (model.num_experts or 1) <= 1:
            self.notes.append(f"{', '.join(names)}: has no effect without --num-experts")
            return
        if given.get("--mlp-type", ["standard"]) != ["standard"]:
            self.faults.append(
                "--mlp-type residual: a dense MLP whose sum with the experts is learned is not "
                "supported; use --moe-shared-expert-intermediate-size with --moe-shared-expert-gate"
            )
        topk = int(self._number("--topk", 1))
        values: dict[str, Any] = {"moe_router_topk": topk}
        if topk == 1:
            values["moe_router_pre_softmax"] = True
        if topk == 2 and "--disable-moe-top2-2nd-expert-sampling" not in given:
            self.faults.append(
                "--topk 2: DeepSpeed draws the second expert at random, which is not supported; "
                "add --disable-moe-top2-2nd-expert-sampling, which takes the second best"
            )
        interval = int(self._number("--expert-interval", 2))
        if interval > (model.num_layers or interval):
            self.faults.append(
                f"--expert-interval {interval}: must be at most --num-layers {model.num_layers}"
            )
        elif model.num_layers and interval > 0:
            values["moe_layer_freq"] = _every(interval, model.num_layers)
        values["moe_aux_loss_coeff"] = (self._number("--moe-loss-coeff", 0.1),)
        tp = self.config.distributed.tensor_model_parallel_size
        if tp > 1 and "--enable-expert-tensor-parallelism" not in given:
            values["expert_tensor_parallel_size"] = 1
        if "--disable-moe-token-dropping" not in given and (factor := self._capacity(topk)):
            values["moe_expert_capacity_factor"] = factor
        self._take(values, chosen)

    def _capacity(self, topk: int) -> float:
        """The tokens that an expert takes. Evaluation has the same capacity as training here, and
        none has a least one: both must not matter.
        """
        config = self.config
        factor = self._number("--moe-train-capacity-factor", 1.0)
        at_evaluation = self._number("--moe-eval-capacity-factor", 1.0)
        least = self._number("--moe-min-capacity", 4)
        if factor != at_evaluation and config.evaluation.eval_iters:
            self.faults.append(
                f"--moe-eval-capacity-factor {at_evaluation:g}: evaluation takes the capacity of "
                f"training; give both as {factor:g}, or --eval-iters 0"
            )
        tokens = (config.training.micro_batch_size or 0) * (config.data.seq_length or 0)
        share = tokens * topk / config.model.num_experts
        if tokens and math.ceil(share * factor) < least:
            self.faults.append(
                f"--moe-min-capacity {least:g}: an expert's capacity of "
                f"{math.ceil(share * factor)} tokens is below it; give "
                f"--moe-train-capacity-factor {least / share:g} or more"
            )
        drawn = "drawn at random" if topk == 1 else "chosen by their place"
        if topk <= 2:
            self.notes.append(
                f"--moe-train-capacity-factor {factor:g}: the tokens that an expert drops are "
                f"{drawn} in DeepSpeed; here those with the smallest weights are "
                "(--moe-token-drop-policy)"
            )
        return factor

    def _take(self, values: dict[str, Any], chosen: set[str]) -> None:
        """The values of fields that the user did not choose by our own flags. A flag that
        contradicts is a fault; a default of Megatron-DeepSpeed gives way.
        """
        for name in [name for name in SETS if name in values and name in chosen]:
            flag, ours = SETS[name], getattr(getattr(self.config, GROUP_OF[name]), name)
            if flag in self.given and ours != values[name]:
                shown = " ".join([flag, *self.given[flag]])
                self.faults.append(
                    f"{shown}: contradicts {spelled(name, ours)}; remove one of them"
                )
        taken = {name: value for name, value in values.items() if name not in chosen}
        self.values |= taken
        shown = " ".join(spelled(*each) for each in taken.items())
        self.notes.append(f"Megatron-DeepSpeed's experts: {shown}")


def _every(interval: int, layers: int) -> str:
    """--moe-layer-freq of a pattern whose groups of `interval` layers end with one of experts."""
    if interval == 1:
        return "1"
    pattern = f"([0]*{interval - 1}+[1])*{layers // interval}"
    return pattern + (f"+[0]*{layers % interval}" if layers % interval else "")
