"""Mutants of data, batches, optimizer, schedules, loss scaling, logging, evaluation and resumes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from oracle.mutants import Make, also, mutant, to
from torch import Tensor

from megatron.data import blend, loader, token_stream
from megatron.data.loader import MockReader, Source
from megatron.model import layer as model_layer
from megatron.model.spec import ParameterSpec
from megatron.observe import metrics
from megatron.optimizer import lr_schedule, optimizer, update
from megatron.optimizer.lr_schedule import LearningRates, ParamSchedule
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.scaler import LossScaler
from megatron.optimizer.update import RULES
from megatron.parallel import blocks
from megatron.training import evaluate, loop, prepare, pretrain, reporting, step
from megatron.training.run import Run

# ---- data


def batches(change: Callable[[Source, Any, int], dict[str, Tensor]]) -> Make:
    """Batches in which something is replaced."""
    return lambda original: (
        lambda self, first, count: dataclasses.replace(
            out := original(self, first, count), **change(self, out, first)
        )
    )


def late_reset(source: Source, batch: Any, _: int) -> dict[str, Tensor]:
    if not source.reset_position_ids:
        return {}
    shifted = batch.position_ids.clone()
    shifted[:, 1:] = torch.where(
        batch.tokens[:, :-1] == source.eod,
        batch.position_ids[:, :-1] + 1,
        batch.position_ids[:, 1:] - 1,
    )
    return {"position_ids": shifted.clamp(min=0)}


def without(flag: str) -> Make:
    """Sources that do not know a flag."""
    return lambda original: lambda config: {**original(config), flag: False}


mutant("data", "end-of-document tokens not masked", "documents", loader, "_flags")(
    without("eod_mask_loss")
)
mutant("data", "positions not reset", "documents", loader, "_flags")(without("reset_position_ids"))
mutant("data", "positions reset one token late", "documents", Source, "batch")(batches(late_reset))
mutant(
    "data", "the loss masked where the label is an end of document", "documents", Source, "batch"
)(
    batches(
        lambda source, out, _: (
            {"loss_mask": (out.labels != source.eod).float()} if source.eod_mask_loss else {}
        )
    )
)
mutant("data", "labels not shifted", "llama", Source, "batch")(
    batches(lambda source, out, _: {"labels": out.tokens})
)


@mutant(
    "data",
    "samples at multiples of the sequence length",
    "llama",
    token_stream.TokenStream,
    "places",
)
def _(original):
    def places(self, index):
        keys = token_stream.mix(
            self.key + token_stream.mix((index // self.samples).astype(np.uint64))
        )
        return token_stream.permute(index % self.samples, self.samples, keys) * self.seq_length

    return places


@mutant("data", "samples in the order of the file", "llama", token_stream, "permute")
def _(original):
    return lambda index, n, key: index


@mutant("data", "the same order in every epoch", "many-epochs", token_stream.TokenStream, "places")
def _(original):
    return lambda self, index: original(self, index % self.samples)


@mutant(
    "data",
    "a sample that reaches the end of the data repeats the last token",
    "many-epochs",
    token_stream.TokenStream,
    "read",
)
def _(original):
    def read(self, index, rows, out):
        original(self, index, rows, out)
        for place, row in zip(self.places(index).tolist(), rows.tolist(), strict=True):
            inside = self.num_tokens - place
            if inside < self.seq_length + 1:
                out[row, inside:] = out[row, inside - 1]

    return read


@mutant(
    "data", "boundaries of splits rounded down", "uneven-split-seed-llama3", loader, "split_range"
)
def _(original):
    def split_range(shares, split, sequences):
        k = loader.SPLITS.index(split)
        return int(sum(shares[:k]) * sequences), int(sum(shares[: k + 1]) * sequences)

    return split_range


@mutant("data", "validation reads the training data", "gpt-files", loader, "split_range")
def _(original):
    return lambda shares, split, sequences: original(shares, "train", sequences)


@mutant(
    "data",
    "validation data in the training's order of the seed",
    "gpt-files",
    loader,
    "EVALUATION_SEED",
)
def _(original):
    return 1234


@mutant(
    "data", "mock validation data that are the training's", "gpt-dropout", MockReader, "windows"
)
def _(original):
    return lambda self, sample: original(dataclasses.replace(self, split="train"), sample)


@mutant("data", "shares of a blend rounded down", "tests/unit/data/test_blend.py", blend, "quotas")
def _(original):
    def quotas(weights, names):
        shares = [int(weight / sum(weights) * blend.PATTERN) for weight in weights]
        return [*shares[:-1], blend.PATTERN - sum(shares[:-1])]

    return quotas


@mutant("data", "weights of a blend ignored", "resume-new-blend", loader, "quotas")
def _(original):
    return lambda weights, names: original([1.0] * len(weights), names)


@mutant(
    "data", "a blend that reads one source after the other", "resume-new-blend", blend, "pattern"
)
def _(original):
    return lambda shares: np.sort(original(shares))


@mutant(
    "data",
    "a blend that passes over samples of its sources",
    "resume-new-blend",
    blend.Blend,
    "locate",
)
def _(original):
    def locate(self, sample):
        source, _ = original(self, sample)
        return source, self.first_index[source] + sample - self.first_sample

    return locate


@mutant(
    "data", "sources begin anew where a blend changes", "resume-new-blend", loader, "extend_history"
)
def _(original):
    def extend(history, consumed, sources):
        if history is None:
            return original(history, consumed, sources)
        bare = {
            "segments": [
                {**segment, "sources": [{**source, "id": ""} for source in segment["sources"]]}
                for segment in history["segments"]
            ]
        }
        return original(bare, consumed, sources)

    return extend


@mutant("data", "every micro-batch reads the step's first samples", "llama", Run, "own_samples")
def _(original):
    def own_samples(self, first):
        size = self.config.training.global_batch_size
        return original(self, first // size * size)

    return own_samples


# ---- batches


@mutant("batch", "the normaliser of the whole batch under ramp-up", "ramp-up", step, "update")
def _(original):
    def changed(run, gradients, totals, **kwargs):
        more = run.config.training.global_batch_size / gradients.batch_size
        step_with = run.optimizer.step

        def stepped(*, grad_scale, **rest):
            return step_with(grad_scale=grad_scale * more, **rest)

        with mock.patch.object(run.optimizer, "step", stepped):
            return original(run, gradients, totals, **kwargs)

    return changed


@mutant(
    "batch", "a ramp-up that grows one increment early", "ramp-up", step, "global_batch_size_at"
)
def _(original):
    def size_at(consumed, config):
        increment = config.training.rampup_batch_size[1] if config.training.rampup_batch_size else 0
        return min(original(consumed, config) + increment, config.training.global_batch_size)

    return size_at


# ---- AdamW and SGD


def adamw(
    *,
    corrections: Callable[[int], tuple[int, int]] = lambda t: (t, t),
    swap: bool = False,
    epsilon: str = "outside",
    decay: str = "first",
) -> Make:
    """AdamW by its definition but for what is given: the steps that each correction counts, and
    where epsilon and decay come in.
    """

    def make(original):
        def apply(config, weight, grad, exp_avg, exp_avg_sq, at):
            lr, weight_decay, eps = at.lr, at.weight_decay, at.eps
            beta1, beta2, t = config.adam_beta1, config.adam_beta2, int(at.number)
            if swap:
                beta1, beta2 = beta2, beta1
            g = grad if at.divisor is None else grad / at.divisor
            if decay == "in the gradient":
                g = g + weight_decay * weight
            if decay == "first":
                weight.mul_(1 - lr * weight_decay)
            if decay == "without the rate":
                weight.mul_(1 - weight_decay)
            exp_avg.lerp_(g, 1 - beta1)
            exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            first, second = (
                1 - beta**steps if steps else 1.0
                for beta, steps in zip((beta1, beta2), corrections(t), strict=True)
            )
            root = {
                "outside": lambda v: (v / second).sqrt() + eps,
                "inside": lambda v: (v / second + eps).sqrt(),
                "before correction": lambda v: (v.sqrt() + eps) / math.sqrt(second),
            }[epsilon](exp_avg_sq)
            weight.sub_(lr / first * exp_avg / root)

        return apply

    return make


for name, make in {
    "no bias correction": adamw(corrections=lambda t: (0, 0)),
    "no bias correction of the second moment": adamw(corrections=lambda t: (t, 0)),
    "bias correction one step ahead": adamw(corrections=lambda t: (t + 1, t + 1)),
    "betas exchanged": adamw(swap=True),
    "epsilon inside the root": adamw(epsilon="inside"),
    "epsilon before the correction": adamw(epsilon="before correction"),
    "weight decay in the gradient": adamw(decay="in the gradient"),
    "weight decay without the rate": adamw(decay="without the rate"),
}.items():
    mutant("optimizer", name, "llama", RULES["adam"]["torch-fused"], "step")(make)

mutant("optimizer", "weight decay of vectors", "gpt-files", ParameterSpec, "decay")(
    to(property(lambda self: True))
)


@mutant(
    "optimizer", "no weight decay of the vocabulary's matrices", "llama", ParameterSpec, "decay"
)
def _(original):
    return property(lambda self: original.fget(self) and self.tensors[0].kind == "matrix")


@mutant("optimizer", "Nesterov's momentum", "sgd", update, "sgd")
def _(original):
    return lambda *args, **kwargs: original(*args, **{**kwargs, "nesterov": True})


@mutant("optimizer", "momentum with dampening", "sgd", update, "sgd")
def _(original):
    return lambda *args, momentum, **kwargs: original(
        *args, momentum=momentum, **{**kwargs, "dampening": 1 - momentum}
    )


@mutant("optimizer", "SGD's weight decay outside the gradient", "sgd", update, "sgd")
def _(original):
    def sgd(weights, *args, weight_decay, lr, **kwargs):
        weights[0].mul_(1 - lr * weight_decay)
        return original(weights, *args, weight_decay=0.0, lr=lr, **kwargs)

    return sgd


@mutant("optimizer", "frozen units trained", "frozen", blocks, "frozen_units")
def _(original):
    return lambda config: frozenset()


@mutant(
    "model",
    "the seed of initial weights ignored",
    "uneven-split-seed-llama3",
    optimizer,
    "fill_initial",
)
def _(original):
    return lambda box, local, seed, backend: original(box, local, 1234, backend)


@mutant(
    "data",
    "the seed of the data's order ignored",
    "uneven-split-seed-llama3",
    token_stream,
    "key_of",
)
def _(original):
    return lambda *parts: (
        original(*parts[:-1], 1234)
        if parts[0] != "identity" and parts[0] != "content"
        else original(*parts)
    )


# ---- clipping and the norm


@mutant(
    "clipping", "every gradient scaled to the limit", "gpt-files", optimizer, "clip_coefficient"
)
def _(original):
    return lambda norm, limit: limit / (norm + 1e-6) if limit else original(norm, limit)


@mutant("clipping", "the coefficient applied twice", "sgd", optimizer, "clip_coefficient")
def _(original):
    return lambda norm, limit: original(norm, limit).square()


@mutant("clipping", "the limit held against the squared norm", "sgd", optimizer, "clip_coefficient")
def _(original):
    return lambda norm, limit: original(norm.square(), limit)


def decayed_end(block) -> int:
    """Elements at a block's beginning that take weight decay: its matrices."""
    return max((end for end, each in block.plan.ranges if each.weight_decay > 0), default=0)


@mutant("clipping", "a norm without the vectors", "gpt-files", Optimizer, "grad_sq_sum")
def _(original):
    def grad_sq_sum(self):
        decayed = (block.grad_shard[: decayed_end(block)] for block in self.trained)
        return sum(part.double().square().sum() for part in decayed)

    return grad_sq_sum


@mutant("clipping", "the largest block's norm for the whole", "llama", Optimizer, "grad_sq_sum")
def _(original):
    return lambda self: torch.stack(
        [block.grad_shard.double().square().sum() for block in self.trained]
    ).max()


@mutant("clipping", "clipped before the division by valid tokens", "documents", Optimizer, "step")
def _(original):
    def changed(self, *, grad_sq_sum, grad_scale, **kwargs):
        real = optimizer.clip_coefficient
        with mock.patch.object(
            optimizer, "clip_coefficient", lambda norm, limit: real(norm / grad_scale, limit)
        ):
            return original(self, grad_sq_sum=grad_sq_sum, grad_scale=grad_scale, **kwargs)

    return changed


# ---- schedules


def rates(
    case: str, name: str
) -> Callable[[Callable[[Callable, ParamSchedule, int], float]], None]:
    """A mutant of the learning rate: f(original, schedule, samples)."""
    return lambda f: (
        mutant("schedule", name, case, ParamSchedule, "learning_rate")(
            lambda original: lambda self, samples: f(original, self, samples)
        )
        and None
    )


rates("gpt-files", "a warm-up that is one sample longer")(
    lambda f, s, x: f(dataclasses.replace(s, warmup=s.warmup + 1), x)
)
rates("gpt-files", "a decay that begins with the warm-up")(
    lambda f, s, x: f(s, x) if x <= s.warmup else f(dataclasses.replace(s, warmup=0), x)
)
rates("mixed-2", "a decay to zero instead of the minimum")(
    lambda f, s, x: f(dataclasses.replace(s, min_lr=0.0), x)
)
rates("gpt-files", "a cosine for which a line is asked and the other way round")(
    lambda f, s, x: f(
        dataclasses.replace(
            s, style={"linear": "cosine", "cosine": "linear"}.get(s.style, s.style)
        ),
        x,
    )
)
rates("mixed-0", "an inverse square root that ignores the warm-up")(
    lambda f, s, x: (
        f(s, x)
        if x <= s.warmup or s.style != "inverse-square-root"
        else max(s.min_lr, s.max_lr / math.sqrt(x))
    )
)
rates("mixed-2", "a line that continues below the minimum after the decay")(
    lambda f, s, x: f(s, x) if x <= s.decay else 2 * f(s, s.decay) - f(s, 2 * s.decay - x)
)
rates("in-samples", "a warm-up from zero")(
    lambda f, s, x: f(dataclasses.replace(s, init_lr=0.0), x)
)
rates("documents", "a constant rate that decays")(
    lambda f, s, x: f(
        dataclasses.replace(s, style="linear" if s.style == "constant" else s.style), x
    )
)
NEXT_STYLE = {
    "exponential": ("linear", "ramp-up"),
    "linear": ("cosine", "mixed-10"),
    "cosine": ("minus_sqrt", "mixed-7"),
    "minus_sqrt": ("exponential", "mixed-4"),
}
for style, (following, case) in NEXT_STYLE.items():
    rates(case, f"WSD's decay {style} as the next style")(
        lambda f, s, x, other=following: f(dataclasses.replace(s, wsd_style=other), x)
    )
rates("ramp-up", "WSD's decay one step early")(
    lambda f, s, x: f(dataclasses.replace(s, wsd_decay=s.wsd_decay + 4), x)
)


@mutant(
    "schedule",
    "lengths in iterations counted in whole batches under ramp-up",
    "ramp-up",
    lr_schedule,
    "samples_after",
)
def _(original):
    return lambda iterations, config: iterations * config.training.global_batch_size


@mutant(
    "schedule",
    "a warm-up share of the run instead of the decay",
    "uneven-split-seed-llama3",
    ParamSchedule,
    "learning_rate",
)
def _(original):
    return lambda self, samples: original(
        dataclasses.replace(self, warmup=self.warmup / self.decay * self.weight_decay_length),
        samples,
    )


@mutant("schedule", "a learning rate one step late", "gpt-files", step, "update")
def _(original):
    def changed(run, gradients, totals, *, rates, **others):
        late = run.schedule.learning_rates(run.progress.scheduled_samples)
        return original(run, gradients, totals, rates=late, **others)

    return changed


@mutant("schedule", "a weight decay one step late", "mixed-5", step, "update")
def _(original):
    def changed(run, gradients, totals, *, weight_decay, **others):
        late = run.schedule.weight_decay(run.progress.scheduled_samples)
        return original(run, gradients, totals, weight_decay=late, **others)

    return changed


@mutant(
    "schedule", "weight decay that stays at its start", "mixed-5", ParamSchedule, "weight_decay"
)
def _(original):
    return lambda self, samples: self.start_weight_decay


@mutant(
    "schedule",
    "a cosine of weight decay for which a line is asked and the other way round",
    "mixed-8",
    ParamSchedule,
    "weight_decay",
)
def _(original):
    other = {"linear": "cosine", "cosine": "linear"}
    return lambda self, samples: original(
        dataclasses.replace(
            self, weight_decay_style=other.get(self.weight_decay_style, "constant")
        ),
        samples,
    )


@mutant(
    "schedule", "embedding and head at the rate of all else", "decoupled-tied", LearningRates, "of"
)
def _(original):
    return lambda rates, multipliers: rates.base * multipliers.lr


def with_rate(spec: ParameterSpec, decoupled: bool) -> ParameterSpec:
    """The declaration of a tensor with the other of a step's two rates."""
    (tensor,) = spec.tensors
    multipliers = dataclasses.replace(tensor.multipliers, decoupled_lr=decoupled)
    return dataclasses.replace(
        spec, tensors=(dataclasses.replace(tensor, multipliers=multipliers),)
    )


@mutant(
    "schedule",
    "learned positions at the rate of the word embedding",
    "decoupled-tied",
    model_layer,
    "matrix",
)
def _(original):
    return lambda name, *args, **declared: (
        with_rate(original(name, *args, **declared), True)
        if name == "embedding.position.weight"
        else original(name, *args, **declared)
    )


@mutant(
    "schedule",
    "an untied head at the rate of all else",
    "decoupled-untied-resume",
    model_layer,
    "vocabulary_matrix",
)
def _(original):
    return lambda *args, head=False: (
        with_rate(original(*args, head=True), False) if head else original(*args)
    )


@mutant(
    "schedule",
    "a decoupled rate that decays to zero without its own minimum",
    "decoupled-tied",
    ParamSchedule,
    "learning_rates",
)
def _(original):
    return lambda self, samples: original(dataclasses.replace(self, decoupled_min_lr=0.0), samples)


@mutant(
    "schedule",
    "a decoupled rate whose warm-up begins at zero",
    "decoupled-tied",
    ParamSchedule,
    "learning_rates",
)
def _(original):
    def changed(self, samples):
        from_zero = original(dataclasses.replace(self, init_lr=0.0), samples)
        return original(self, samples)._replace(decoupled=from_zero.decoupled)

    return changed


@mutant(
    "schedule",
    "a decoupled rate that decays to --min-lr",
    "decoupled-untied-resume",
    ParamSchedule,
    "learning_rates",
)
def _(original):
    return lambda self, samples: original(
        dataclasses.replace(self, decoupled_min_lr=self.min_lr), samples
    )


@mutant(
    "logging",
    "the base rate logged as the decoupled one",
    "decoupled-tied",
    reporting,
    "_rate_metrics",
)
def _(original):
    return lambda run, rates: original(run, rates._replace(decoupled=rates.base))


@mutant("schedule", "a skipped step advances the schedule", "fp16-overflows", loop, "finish_step")
def _(original):
    def finish_step(run, pending, interval):
        before = run.progress.skipped_samples
        original(run, pending, interval)
        run.progress.scheduled_samples += run.progress.skipped_samples - before

    return finish_step


# ---- loss scaling


@mutant("scaler", "gradients unscaled by the first scale", "fp16-overflows", step, "update")
def _(original):
    def changed(run, gradients, totals, **kwargs):
        return original(
            run,
            dataclasses.replace(gradients, loss_scale=run.config.precision.initial_loss_scale),
            totals,
            **kwargs,
        )

    return changed


def scaler_config(case: str, name: str, **fields: Any) -> None:
    """A scaler with another setting."""
    mutant("scaler", name, case, LossScaler, "__init__")(
        lambda original: lambda self, config: original(self, dataclasses.replace(config, **fields))
    )


scaler_config("fp16-overflows", "hysteresis ignored", hysteresis=1)
scaler_config("fp16-hysteresis", "the least scale ignored", min_loss_scale=2.0**-10)
scaler_config("fp16-one-scale", "the constant scale ignored", loss_scale=None)


@mutant("scaler", "a window of one step more", "fp16-window-of-one", LossScaler, "__init__")
def _(original):
    return lambda self, config: original(
        self, dataclasses.replace(config, loss_scale_window=config.loss_scale_window + 1)
    )


@mutant("scaler", "a scale that grows fourfold", "fp16-window-of-one", LossScaler, "update")
def _(original):
    def changed(self, overflow):
        before = self.scale
        original(self, overflow)
        self.scale *= 2 if self.scale > before else 1

    return changed


@mutant("scaler", "clean steps counted through an overflow", "fp16-overflows", LossScaler, "update")
def _(original):
    def changed(self, overflow):
        clean = self.clean_steps
        original(self, overflow)
        if overflow:
            self.clean_steps = clean

    return changed


@mutant(
    "scaler", "hysteresis that growth does not renew", "fp16-window-of-one", LossScaler, "update"
)
def _(original):
    def changed(self, overflow):
        left = self.hysteresis
        original(self, overflow)
        self.hysteresis = left if not overflow else self.hysteresis

    return changed


@mutant("scaler", "hysteresis that each clean step renews", "fp16-overflows", LossScaler, "update")
def _(original):
    def changed(self, overflow):
        original(self, overflow)
        if not overflow:
            self.hysteresis = self.config.hysteresis

    return changed


@mutant(
    "scaler", "a skipped step counts in the bias correction", "no-valid-token", Optimizer, "step"
)
def _(original):
    def changed(self, **kwargs):
        outcome = original(self, **kwargs)
        self.steps += outcome.skipped
        return outcome

    return changed


@mutant("scaler", "samples of a skipped step read again", "fp16-overflows", loop, "finish_step")
def _(original):
    def finish_step(run, pending, interval):
        before = run.progress.skipped_samples
        original(run, pending, interval)
        run.progress.consumed_samples -= run.progress.skipped_samples - before

    return finish_step


# ---- logging and evaluation


@mutant("logging", "the loss a mean of micro-batches' means", "documents", step.PendingStep, "read")
def _(original):
    def read(handle):
        report = original(handle)
        means = (each / n for each, n in zip(report.losses, report.tokens, strict=True))
        return dataclasses.replace(report, loss=sum(means) / len(report.losses))

    return read


@mutant("logging", "the last loss of an interval for its mean", "sgd", loop, "log")
def _(original):
    def log(run, interval, *args):
        run.progress.open_loss = interval.last.loss * run.progress.open_steps
        return original(run, interval, *args)

    return log


@mutant("logging", "the gradient norm after clipping", "llama", Optimizer, "step")
def _(original):
    def changed(self, **kwargs):
        outcome = original(self, **kwargs)
        limit = self.config.clip_grad or math.inf
        return dataclasses.replace(outcome, grad_norm=outcome.grad_norm.clamp(max=limit))

    return changed


@mutant("logging", "the rate of the step before", "gpt-files", loop, "log")
def _(original):
    def log(run, interval, rates, recording):
        return original(
            run,
            interval,
            run.schedule.learning_rates(run.progress.scheduled_samples - interval.last.batch_size),
            recording,
        )

    return log


@mutant(
    "logging", "the norm of the weights without vectors", "llama", Optimizer, "squared_weight_norm"
)
def _(original):
    return lambda self: sum(
        block.master[: decayed_end(block)].double().square().sum() for block in self.blocks
    )


@mutant(
    "logging",
    "zeros of the gradient with those of padding",
    "llama",
    Optimizer,
    "count_zero_gradients",
)
def _(original):
    return lambda self: torch.stack(
        [(block.grad_shard == 0).sum().double() for block in self.trained]
    ).sum()


@mutant("logging", "perplexity to the base 2", "gpt-files", metrics, "perplexity")
def _(original):
    return lambda value: 2.0**value


@mutant(
    "evaluation", "validation a mean of batches' means", "documents", evaluate, "run_micro_batches"
)
def _(original):
    def passes(*args, **kwargs):
        sums = original(*args, **kwargs)
        means = sums.losses / sums.tokens
        return sums._replace(losses=means, tokens=torch.ones_like(sums.tokens))

    return passes


@mutant("evaluation", "one batch of validation fewer", "gpt-files", loop, "evaluate")
def _(original):
    def changed(run, *args):
        config = run.config
        fewer = dataclasses.replace(config.evaluation, eval_iters=config.evaluation.eval_iters - 1)
        return original(
            dataclasses.replace(run, config=dataclasses.replace(config, evaluation=fewer)), *args
        )

    return changed


@mutant("evaluation", "every evaluation reads other samples", "gpt-files", loop, "evaluate")
def _(original):
    class Shifted(NamedTuple):
        inner: Any
        by: int

        def windows(self, sample):
            return self.inner.windows(sample + self.by)

    return lambda run, source, *args: original(
        run,
        dataclasses.replace(source, reader=Shifted(source.reader, run.progress.iteration)),
        *args,
    )


@mutant("evaluation", "the test reads the validation data", "gpt-files", loop, "evaluate_all")
def _(original):
    def changed(run, split):
        return original(
            dataclasses.replace(run, data=dataclasses.replace(run.data, test=run.data.valid)), split
        )

    return changed


@also(pretrain, "evaluate_all")
def _(original):
    return lambda *args: loop.evaluate_all(*args)


@mutant(
    "evaluation",
    "the validation of several sources a plain mean",
    "resume-new-blend",
    loop,
    "blended",
)
def _(original):
    return lambda sources, values: sum(values) / len(values)


@mutant(
    "evaluation",
    "bits per byte without the logarithm of 2",
    "many-epochs",
    loop,
    "evaluation_metrics",
)
def _(original):
    def changed(*args, **kwargs):
        found = original(*args, **kwargs)
        return {
            name: value * (math.log(2) if name.startswith("bits") else 1)
            for name, value in found.items()
        }

    return changed


@mutant("evaluation", "--skip-train evaluates initial weights", "evaluate-only", pretrain, "load")
def _(original):
    return lambda checkpoint, run: (
        run.optimizer.initialise()
        if run.config.evaluation.skip_train
        else original(checkpoint, run)
    )


# ---- resume and finetuning


def after_load(area: str, name: str, case: str) -> Callable[[Callable[[Any, Any], None]], None]:
    """A mutant that changes a run when it has loaded its checkpoint."""

    def register(change: Callable[[Any, Any], None]) -> None:
        def make(original):
            def load(checkpoint, run):
                original(checkpoint, run)
                change(checkpoint, run)

            return load

        mutant(area, name, case, pretrain, "load")(make)

    return register


@after_load("resume", "moments dropped at a resume", "resume")
def _(checkpoint, run):
    for block in run.optimizer.trained:
        for name in run.optimizer.state_names:
            run.optimizer.kept[block].tensors[name].zero_()


@after_load("resume", "bias correction begins anew at a resume", "resume")
def _(checkpoint, run):
    run.optimizer.steps.zero_()


@after_load("resume", "the schedule begins anew at a resume", "resume")
def _(checkpoint, run):
    run.progress.scheduled_samples = 0


@after_load("resume", "the loss scale begins anew at a resume", "resume-fp16")
def _(checkpoint, run):
    run.scaler.__init__(run.config.precision)


@after_load("resume", "weights rounded at a resume", "resume")
def _(checkpoint, run):
    for each in run.optimizer.blocks:
        each.master.copy_(each.master.bfloat16())


@after_load("resume", "finetuning continues with the checkpoint's schedule", "finetune")
def _(checkpoint, run):
    if run.config.checkpoint.finetune:
        run.progress.scheduled_samples = checkpoint.state["scheduled_samples"]


@after_load("resume", "losses since the last line dropped at a resume", "resume-between-log-lines")
def _(checkpoint, run):
    run.progress.open_loss, run.progress.open_steps = 0.0, 0


@after_load("resume", "skipped samples not counted on at a resume", "resume-fp16")
def _(checkpoint, run):
    run.progress.skipped_samples = 0


def load_with(original, **options):
    """`load` as if these options of --load had been given."""

    def load(checkpoint, run):
        changed = dataclasses.replace(run.config.checkpoint, **options)
        config = dataclasses.replace(run.config, checkpoint=changed)
        original(checkpoint, dataclasses.replace(run, config=config))

    return load


@mutant("resume", "--no-load-optim ignored", "resume-without-moments", pretrain, "load")
def _(original):
    return load_with(original, load_optim=True)


@mutant("resume", "finetuning keeps moments", "finetune", pretrain, "load")
def _(original):
    return load_with(original, finetune=False)


@mutant("resume", "the data state dropped at a resume", "resume", step, "forward_backward")
def _(original):
    begun = {}

    def changed(run, *, first_sample, **kwargs):
        start = begun.setdefault(id(run), first_sample)
        return original(run, first_sample=first_sample - start, **kwargs)

    return changed


@mutant("resume", "finetuning reads on in the data", "finetune", step, "forward_backward")
def _(original):
    def changed(run, *, first_sample, **kwargs):
        return original(
            run, first_sample=first_sample + (8 if run.config.checkpoint.finetune else 0), **kwargs
        )

    return changed


@mutant(
    "resume",
    "the checkpoint's schedule instead of the overriding one",
    "resume-sgd-new-schedule",
    prepare,
    "resumed_schedule",
)
def _(original):
    return lambda ours, theirs, config: ParamSchedule(**theirs)
