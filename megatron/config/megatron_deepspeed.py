"""Flags of Megatron-DeepSpeed whose meaning depends on other flags of the line: lengths in tokens,
and its mixture of experts with defaults that differ from Megatron-LM's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from megatron.config.derive import GROUP_OF
from megatron.config.groups import Config
from megatron.config.metadata import flag_name

Given = dict[str, list[str]]  # flag -> the words after it

LENGTHS = ("--train-tokens", "--lr-decay-tokens", "--lr-warmup-tokens")


@dataclass
class Translation:
    """Settings that flags mean, notes about them for the banner, and faults."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def translate(given: Given, config: Config, chosen: set[str], *, is_deepspeed: bool) -> Translation:
    """The settings that `given` means in addition to those of `config`, of which the user chose
    the fields `chosen`. `is_deepspeed`: the line holds --deepspeed, so that a plain --num-experts
    has Megatron-DeepSpeed's defaults, too.
    """
    result = Translation()
    lengths = {name: words for name, words in given.items() if name in LENGTHS}
    experts = {name: words for name, words in given.items() if name not in LENGTHS}
    if lengths:
        _lengths(lengths, config, result)
    ours = any(name.startswith("moe_") for name in chosen)
    if experts or (is_deepspeed and not ours and (config.model.num_experts or 1) > 1):
        _experts(experts, config, chosen, result)
    return result


def _number(given: Given, name: str, default: float, result: Translation) -> float:
    """The one number after a flag, or its default; a fault for anything else."""
    if name not in given:
        return default
    words = given[name]
    try:
        value = float(words[0]) if len(words) == 1 else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        result.faults.append(f"{' '.join([name, *words])}: expected one number of 0 or more")
        return default
    return value


# ---------------------------------------------------------------- lengths in tokens


def _lengths(given: Given, config: Config, result: Translation) -> None:
    """A length in tokens is converted to a length in samples. Where another length is given
    as well, Megatron-DeepSpeed ends at the shorter one, and decays by tokens.
    """
    tokens = {name: int(_number(given, name, 0, result)) for name in given}
    length, training, optimizer = config.data.seq_length, config.training, config.optimizer
    if result.faults or not length or length < 1:
        return
    values = _in_samples(given, config, result)
    ends = [values.get("train_samples"), training.train_samples]
    whole = max((end for end in ends if end), default=None)
    if "--train-tokens" in given:
        # consumed samples x length reaches the tokens with this many samples
        ends.append(-(-tokens["--train-tokens"] // length))
    values["train_samples"] = min((end for end in ends if end), default=None)
    if whole and optimizer.lr_decay_samples is None:
        values.setdefault("lr_decay_samples", whole)
    for name in ("--lr-decay-tokens", "--lr-warmup-tokens"):
        if name in given:
            ours = name[2:].replace("-", "_").replace("tokens", "samples")
            values[ours] = round(tokens[name] / length)
    if result.faults:
        return
    result.values |= values
    shown = " ".join(
        f"{flag_name(name)} {value}"
        for name, value in values.items()
        if name.endswith("samples") and value is not None
    )
    result.notes.append(f"{', '.join(given)}: in samples of --seq-length {length}: {shown}")


def _in_samples(given: Given, config: Config, result: Translation) -> dict[str, Any]:
    """The lengths in iterations that are given, in samples. Batches of several sizes have none to
    do it with.
    """
    training, optimizer = config.training, config.optimizer
    varies = training.rampup_batch_size or training.step_batch_size_schedule
    batch = None if varies else training.global_batch_size
    lengths = {
        "train_iters": training.train_iters,
        "lr_warmup_iters": optimizer.lr_warmup_iters,
        "lr_decay_iters": None if "--lr-decay-tokens" in given else optimizer.lr_decay_iters,
    }
    lengths = {name: count for name, count in lengths.items() if count}
    if lengths and batch is None:
        shown = ", ".join(map(flag_name, lengths))
        result.faults.append(
            f"{', '.join(given)}: {shown} must be in samples, too, which needs a "
            "--global-batch-size of one size"
        )
    values: dict[str, Any] = {"lr_decay_iters": None}
    for name, count in lengths.items():
        values[name] = 0 if name == "lr_warmup_iters" else None
        values[name.replace("iters", "samples")] = count * (batch or 0)
    return values


# ---------------------------------------------------------------- experts


def _experts(given: Given, config: Config, chosen: set[str], result: Translation) -> None:
    """Megatron-DeepSpeed's experts: top-1 with the softmax over all logits, in every second layer,
    each with a capacity, unless flags specify otherwise.
    """
    count = config.model.num_experts
    if count is None or count <= 1:
        names = ", ".join(given)
        result.notes.append(
            f"{names}: has an effect only in mixture-of-experts models (--num-experts)"
        )
        return
    if given.get("--mlp-type", ["standard"]) != ["standard"]:
        result.faults.append(
            "--mlp-type residual: a dense MLP whose sum with the experts is learned is not "
            "supported; the nearest is --moe-shared-expert-intermediate-size with "
            "--moe-shared-expert-gate"
        )
    topk = int(_number(given, "--topk", 1, result))
    values: dict[str, Any] = {"moe_router_topk": topk}
    if topk == 1:
        values["moe_router_pre_softmax"] = True
    if topk == 2 and "--disable-moe-top2-2nd-expert-sampling" not in given:
        result.faults.append(
            "--topk 2: DeepSpeed draws the second expert at random, which is not supported; add "
            "--disable-moe-top2-2nd-expert-sampling, which takes the second best"
        )
    interval = int(_number(given, "--expert-interval", 2, result))
    if config.model.num_layers and interval > 0:
        values["moe_layer_freq"] = _every(interval, config.model.num_layers)
    if interval > (config.model.num_layers or interval):
        result.faults.append(
            f"--expert-interval {interval}: no layer has experts; it must be at most "
            f"--num-layers {config.model.num_layers}"
        )
    values["moe_aux_loss_coeff"] = (_number(given, "--moe-loss-coeff", 0.1, result),)
    tp = config.distributed.tensor_model_parallel_size
    if tp > 1 and "--enable-expert-tensor-parallelism" not in given:
        values["expert_tensor_parallel_size"] = 1
    if "--disable-moe-token-dropping" not in given:
        values |= _capacity(given, config, topk, result)
    _take(values, given, config, chosen, result)


def _every(interval: int, layers: int) -> str:
    """--moe-layer-freq of a pattern whose groups of `interval` layers end with one of experts."""
    if interval == 1:
        return "1"
    pattern = f"([0]*{interval - 1}+[1])*{layers // interval}"
    return pattern + (f"+[0]*{layers % interval}" if layers % interval else "")


def _capacity(given: Given, config: Config, topk: int, result: Translation) -> dict[str, Any]:
    """The tokens that an expert takes. Evaluation has the same capacity as training here, and none
    has a least one: both must not matter.
    """
    factor = _number(given, "--moe-train-capacity-factor", 1.0, result)
    at_evaluation = _number(given, "--moe-eval-capacity-factor", 1.0, result)
    least = _number(given, "--moe-min-capacity", 4, result)
    if factor != at_evaluation and config.evaluation.eval_iters:
        result.faults.append(
            f"--moe-eval-capacity-factor {at_evaluation:g}: evaluation takes the capacity of "
            f"training; give both as {factor:g}, or --eval-iters 0"
        )
    micro, length = config.training.micro_batch_size, config.data.seq_length
    if micro and length:
        share = micro * length * topk / (config.model.num_experts or 1)
        if math.ceil(share * factor) < least:
            result.faults.append(
                f"--moe-min-capacity {least:g}: an expert's capacity of "
                f"{math.ceil(share * factor)} tokens is below it; give "
                f"--moe-train-capacity-factor {least / share:g} or more"
            )
    drawn = "drawn at random" if topk == 1 else "chosen by their place"
    if topk <= 2:
        result.notes.append(
            f"--moe-train-capacity-factor {factor:g}: the tokens that an expert drops are {drawn} "
            "in DeepSpeed; here those with the smallest weights are (--moe-token-drop-policy)"
        )
    return {"moe_expert_capacity_factor": factor} if factor else {}


# Field -> the flag of Megatron-DeepSpeed that sets it.
SETS = {
    "moe_router_topk": "--topk",
    "moe_layer_freq": "--expert-interval",
    "moe_aux_loss_coeff": "--moe-loss-coeff",
    "moe_expert_capacity_factor": "--moe-train-capacity-factor",
}


def _take(
    values: dict[str, Any], given: Given, config: Config, chosen: set[str], result: Translation
) -> None:
    """The values of fields that the user did not choose by our own flags. A flag that contradicts
    is a fault; a default of Megatron-DeepSpeed gives way.
    """
    taken = {name: value for name, value in values.items() if name not in chosen}
    for name in values.keys() - taken.keys():
        flag, ours = SETS.get(name), getattr(getattr(config, GROUP_OF[name]), name)
        if flag in given and ours != values[name]:
            result.faults.append(
                f"{' '.join([flag, *given[flag]])}: contradicts {flag_name(name)} {_shown(ours)}; "
                "remove one of them"
            )
    result.values |= taken
    shown = " ".join(
        flag_name(name) + ("" if value is True else f" {_shown(value)}")
        for name, value in taken.items()
    )
    result.notes.append(f"Megatron-DeepSpeed's experts: {shown}")


def _shown(value: Any) -> str:
    return " ".join(f"{item:g}" for item in value) if isinstance(value, tuple) else str(value)
