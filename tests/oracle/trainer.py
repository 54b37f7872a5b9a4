"""The training loop: gradients by autograd over the whole global batch at once, updates by
torch.optim.
"""

from __future__ import annotations

import copy
import math
from argparse import Namespace
from dataclasses import dataclass, field

import torch
from oracle.data import Blend, Reader, batch_of, held_out_data, training_data
from oracle.model import Model, Weights, initial, shapes
from oracle.schedule import LossScale, Schedule, batch_size
from oracle.settings import read
from torch import Tensor

Rows = dict[int, dict[str, float]]


@dataclass
class State:
    """All that a run goes on from."""

    weights: Weights
    moments: dict
    iteration: int = 0
    consumed: int = 0
    scheduled: int = 0  # samples of steps that were taken: what the schedules count
    skipped: int = 0  # samples of steps that were not
    scale: LossScale | None = None
    blend: Blend | None = None
    known: dict[tuple, int] = field(
        default_factory=dict
    )  # the next sample of each source that was ever read


@dataclass
class Outcome:
    """What a run shows: metrics by iteration, skipped and nan iterations of each log interval, the
    state at its end.
    """

    rows: Rows
    skips: Rows
    state: State
    margin: float  # how near fp16's limit and a step's largest gradient come: greater / smaller
    first_weights: Weights


def optimizer_of(c: Namespace, weights: Weights) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not."""
    groups = [
        {"params": [w for w in weights.values() if w.dim() > 1], "decays": True},
        {"params": [w for w in weights.values() if w.dim() == 1], "decays": False},
    ]
    if c.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=1.0, momentum=c.sgd_momentum)
    return torch.optim.AdamW(groups, lr=1.0, betas=(c.adam_beta1, c.adam_beta2), eps=c.adam_eps)


class Trainer:
    """One run of a command line, from its beginning or from a state."""

    def __init__(self, argv: list[str], before: State | None = None):
        c = self.c = read(argv)
        start = copy.deepcopy(before) if before is not None else None
        if start is None:
            start = State(initial(c), {})
        elif c.finetune:
            start = State(start.weights, {})
        self.state = state = start
        self.first_weights = {name: w.detach().clone() for name, w in state.weights.items()}
        assert state.weights.keys() == shapes(c).keys()
        for w in state.weights.values():
            w.requires_grad_(True)
        self.optimizer = optimizer_of(c, state.weights)
        if state.moments:
            self.optimizer.load_state_dict(state.moments)
        state.scale = state.scale or LossScale(c)
        state.scale.c = c
        if state.blend is not None:
            state.known |= state.blend.reached(state.consumed)
        self.data = training_data(c, state.blend, state.known, state.consumed)
        state.blend = self.data if isinstance(self.data, Blend) else None
        self.schedule, self.model, self.rows, self.skips = Schedule(c), Model(c), {}, {}
        self.margins, self.real = [math.inf], False

    def run(self) -> Outcome:
        """Train to the end, or to --exit-interval."""
        c, state = self.c, self.state
        losses: list[float] = []
        bad, ended = {"skipped": 0, "nan": 0}, False
        while not (c.skip_train or self.finished() or ended):
            report, taken = self.step()
            losses += [report["lm loss"]] if taken else []
            bad["skipped"] += not taken
            bad["nan"] += self.real
            ended = c.exit_interval is not None and state.iteration % c.exit_interval == 0
            if state.iteration % c.log_interval == 0 or self.finished():
                report["lm loss"] = sum(losses) / len(losses) if losses else report["lm loss"]
                self.rows[state.iteration] = report
                self.skips[state.iteration] = bad
                losses, bad = [], {"skipped": 0, "nan": 0}
            if state.iteration % c.eval_interval == 0 or self.finished():
                self.evaluate("valid", "validation")
        if c.skip_train:
            self.evaluate("valid", "validation")
        if c.skip_train or self.finished():
            self.evaluate("test", "test")
        state.moments = self.optimizer.state_dict()
        return Outcome(self.rows, self.skips, state, min(self.margins), self.first_weights)

    def finished(self) -> bool:
        if self.c.train_iters:
            return self.state.iteration >= self.c.train_iters
        return self.state.consumed >= self.c.train_samples

    def step(self) -> tuple[dict[str, float], bool]:
        """One global batch: what is logged of it, and whether the weights moved."""
        c, state = self.c, self.state
        size = batch_size(c, state.consumed)
        scale, rate = state.scale.value, self.schedule.learning_rate(state.scheduled + size)
        loss, tokens, gradients = self.gradients(state.consumed, size, scale)
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        report = {
            "learning-rate": rate,
            "batch-size": size,
            "loss-scale": scale,
            "lm loss": loss,
            "grad-norm": norm,
        }
        if c.log_num_zeros_in_grad:
            report["num-zeros"] = sum(int((g == 0).sum()) for g in gradients)
        taken = math.isfinite(norm) and math.isfinite(loss)
        if taken:
            self.update(gradients, norm, rate, self.schedule.weight_decay(state.scheduled + size))
            state.scheduled += size
        else:
            state.skipped += size
        overflow = not taken and tokens > 0
        self.real = overflow and state.scale.at_minimum()  # no smaller scale can cure it
        assert not self.real or c.nan_policy == "skip"
        state.scale.after(overflow)
        state.iteration += 1
        state.consumed += size
        report |= {
            "consumed_samples": state.consumed,
            "consumed-tokens": state.consumed * c.seq_length,
            "skipped-train-samples": state.skipped,
        }
        if c.log_params_norm:
            report["params-norm"] = math.sqrt(
                sum(float(w.detach().square().sum()) for w in state.weights.values())
            )
        return report, taken

    def gradients(self, first: int, count: int, scale: float) -> tuple[float, float, list[Tensor]]:
        """Mean loss over the valid tokens of these samples, their number, and the gradient of the
        mean objective.
        """
        c, weights = self.c, self.state.weights
        batch = batch_of(c, self.data, first, count)
        loss, lse = self.model.losses(weights, batch, training=True)
        objective = ((loss + c.z_loss_coeff * lse.square()) * batch.loss_mask).sum()
        tokens = float(batch.loss_mask.sum())
        nominal = (
            count * c.seq_length
        )  # what narrow gradients are divided by on their way, so that they keep one range
        self.model.largest.clear()
        scaled = torch.autograd.grad(
            objective * (scale / nominal), list(weights.values()), materialize_grads=True
        )
        if c.fp16 and self.model.largest:
            ratio = max(self.model.largest) / torch.finfo(torch.float16).max
            self.margins.append(max(ratio, 1 / ratio) if ratio else math.inf)
        if tokens == 0:
            return math.nan, 0.0, [torch.full_like(g, math.nan) for g in scaled]
        return (
            float((loss.detach() * batch.loss_mask).sum()) / tokens,
            tokens,
            [g * (nominal / (tokens * scale)) for g in scaled],
        )

    def update(
        self, gradients: list[Tensor], norm: float, rate: float, weight_decay: float
    ) -> None:
        """Clip to the global norm and step."""
        c = self.c
        coefficient = min(1.0, c.clip_grad / (norm + 1e-6)) if c.clip_grad > 0 else 1.0
        for w, g in zip(self.state.weights.values(), gradients, strict=True):
            w.grad = g * coefficient
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = rate, weight_decay if group["decays"] else 0.0
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self, split: str, title: str) -> None:
        """Mean loss per valid token over the first eval-iters x global-batch-size samples of each
        source.
        """
        c = self.c
        sources = held_out_data(c, split, title)
        for name, source in sources.items():
            row = self.rows.setdefault(self.state.iteration, {})
            of = f" {name}" if len(sources) > 1 else ""
            loss = self.mean_loss(source)
            row |= {
                f"lm loss {title}{of}": loss,
                f"lm loss {title} ppl{of}": math.exp(min(20.0, loss)),
            }

    def mean_loss(self, source: Reader) -> float:
        batch = batch_of(self.c, source, 0, self.c.eval_iters * self.c.global_batch_size)
        loss, _ = self.model.losses(self.state.weights, batch, training=False)
        return float((loss * batch.loss_mask).sum() / batch.loss_mask.sum())
