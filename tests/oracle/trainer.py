"""The training loop: autograd over the whole global batch at once, updates by torch.optim."""

from __future__ import annotations

import copy
import math
from argparse import Namespace
from dataclasses import dataclass, field

import torch
from oracle.data import Blend, HeldOut, batch_of, held_out_data, training_data
from oracle.mixture import STATES, after_step
from oracle.model import Model, Weights, initial, shapes
from oracle.schedule import LossScale, Schedule, batch_size
from oracle.settings import read
from torch import Tensor

Rows = dict[int, dict[str, float]]


@dataclass
class Interval:
    """What has come since the last log line."""

    losses: list[float] = field(default_factory=list)  # of the steps that were taken
    skipped: int = 0  # iterations
    nan: int = 0  # of those skipped, the ones that no smaller loss scale can cure


@dataclass
class State:
    """All that a run continues from."""

    weights: Weights
    first_weights: Weights = field(default_factory=dict)
    moments: dict = field(default_factory=dict)
    iteration: int = 0
    consumed: int = 0
    scheduled: int = 0  # samples of steps that were taken: what the schedules count
    skipped: int = 0  # samples of steps that were not
    scale: LossScale | None = None
    blend: Blend | None = None
    known: dict[tuple, int] = field(default_factory=dict)  # of each source ever read, what is next
    interval: Interval = field(default_factory=Interval)


@dataclass
class Outcome:
    """What a run shows: metrics by iteration, what console lines count, the state at its end."""

    rows: Rows
    counts: Rows
    state: State
    margin: float  # how near fp16's limit and a step's largest gradient come: greater / smaller


def unit_of(name: str, layers: int) -> str:
    """The unit of --freeze that a weight belongs to."""
    if name == "embedding.position.weight":
        return "layers.0"
    if name.startswith("final_norm."):
        return f"layers.{layers - 1}"
    return ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])


def frozen_units(text: str | None) -> set[str]:
    """The units of `embedding,layers.0-3,head`."""
    units = set()
    for word in (text or "").split(","):
        kind, _, numbers = word.partition(".")
        first, _, last = numbers.partition("-")
        units |= (
            {f"{kind}.{i}" for i in range(int(first), int(last or first) + 1)} if first else {kind}
        )
    return units


OF_TOKENS = ("embedding.word.weight", "head.weight")  # take the rate of --decoupled-lr


def optimizer_of(c: Namespace, weights: Weights) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not."""
    of_tokens = [w for name, w in weights.items() if name in OF_TOKENS]
    others = [w for name, w in weights.items() if name not in OF_TOKENS]
    groups = [
        {"params": of_tokens, "decays": True, "decoupled": True},
        {"params": [w for w in others if w.dim() > 1], "decays": True, "decoupled": False},
        {"params": [w for w in others if w.dim() == 1], "decays": False, "decoupled": False},
    ]
    if c.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=1.0, momentum=c.sgd_momentum)
    return torch.optim.AdamW(groups, lr=1.0, betas=(c.adam_beta1, c.adam_beta2), eps=c.adam_eps)


def norm_of(tensors: list[Tensor]) -> float:
    """The L2 norm of all elements."""
    return math.sqrt(sum(float(x.detach().square().sum()) for x in tensors))


class Trainer:
    """One run of a command line, from its beginning or from a state."""

    def __init__(self, argv: list[str], before: State | None = None):
        c = self.c = read(argv)
        self.state = state = self._start(before)
        if not state.first_weights:
            state.first_weights = {name: w.detach().clone() for name, w in state.weights.items()}
        frozen = frozen_units(c.freeze)
        trained = {
            name: w.requires_grad_(True)
            for name, w in state.weights.items()
            if unit_of(name, c.num_layers) not in frozen and not name.endswith(STATES)
        }
        self.trained = list(trained.values())
        self.optimizer = optimizer_of(c, trained)
        if state.moments:
            self.optimizer.load_state_dict(state.moments)
        if state.blend is not None:
            state.known |= state.blend.reached(state.consumed)
        self.data = training_data(c, state.blend, state.known, state.consumed)
        state.blend = self.data if isinstance(self.data, Blend) else None
        self.schedule, self.model = Schedule(c), Model(c)
        self.rows: Rows = {}
        self.counts: Rows = {}
        self.margins = [math.inf]

    def _start(self, before: State | None) -> State:
        """A fresh state, or a copy of the one before; of that the weights alone with --finetune."""
        state = State(initial(self.c)) if before is None else copy.deepcopy(before)
        if self.c.finetune:
            state = State(state.weights)
        if self.c.no_load_optim:  # the loss scale belongs to the optimizer
            state.moments, state.scale = {}, None
        assert state.weights.keys() == shapes(self.c).keys()
        state.scale = state.scale or LossScale(self.c)
        state.scale.c = self.c
        return state

    def run(self) -> Outcome:
        """Train to the end, or to --exit-interval."""
        c, state = self.c, self.state
        ended = c.skip_train
        while not (ended or self.finished()):
            report = self.step()
            if state.iteration % c.log_interval == 0 or self.finished():
                self.log(report)
            if state.iteration % c.eval_interval == 0 or self.finished():
                self.evaluate("valid", "validation")
            ended = c.exit_interval is not None and state.iteration % c.exit_interval == 0
        if c.skip_train:
            self.evaluate("valid", "validation")
        if c.skip_train or self.finished():
            self.evaluate("test", "test")
        state.moments = self.optimizer.state_dict()
        return Outcome(self.rows, self.counts, state, min(self.margins))

    def finished(self) -> bool:
        if self.c.train_iters:
            return self.state.iteration >= self.c.train_iters
        return self.state.consumed >= self.c.train_samples

    def log(self, report: dict[str, float]) -> None:
        """One line: the last step's report, with the mean loss of the interval's steps."""
        interval = self.state.interval
        if interval.losses:
            report["lm loss"] = sum(interval.losses) / len(interval.losses)
        self.rows[self.state.iteration] = report
        self.counts[self.state.iteration] = {"skipped": interval.skipped, "nan": interval.nan}
        self.state.interval = Interval()

    def step(self) -> dict[str, float]:
        """One global batch; what is known of it afterwards."""
        c, state = self.c, self.state
        size = batch_size(c, state.consumed)
        clock = state.scheduled + size
        scale, rate = state.scale.value, self.schedule.learning_rate(clock)
        decoupled = self.schedule.decoupled_learning_rate(clock)
        loss, tokens, gradients = self.gradients(state.consumed, size, scale)
        routed = {layer: counts for layer, (_, counts) in self.model.routers.items()}
        norm = norm_of(gradients)
        taken = math.isfinite(norm) and math.isfinite(loss)
        if taken:
            rates = rate, rate if decoupled is None else decoupled
            self.update(gradients, norm, rates, self.schedule.weight_decay(clock))
            for layer, counts in routed.items():
                after_step(c, state.weights, layer, counts)
            state.scheduled = clock
            state.interval.losses.append(loss)
        else:
            self.skip(size, overflow=tokens > 0)
        state.scale.after(overflow=not taken and tokens > 0)
        state.iteration += 1
        state.consumed += size
        report = {
            "learning-rate": rate,
            "batch-size": size,
            "loss-scale": scale,
            "lm loss": loss,
            "grad-norm": norm,
            "consumed_samples": state.consumed,
            "consumed-tokens": state.consumed * c.seq_length,
            "skipped-train-samples": state.skipped,
        }
        if decoupled is not None:
            report["decoupled-learning-rate"] = decoupled
        if c.log_num_zeros_in_grad:
            report["num-zeros"] = sum(int((g == 0).sum()) for g in gradients)
        if c.log_params_norm:
            counted = [w for name, w in state.weights.items() if not name.endswith(STATES)]
            report["params-norm"] = norm_of(counted)
        return report

    def skip(self, size: int, overflow: bool) -> None:
        """Count a step that was not taken."""
        state = self.state
        state.skipped += size
        state.interval.skipped += 1
        if overflow and state.scale.at_minimum():
            assert self.c.nan_policy == "skip"
            state.interval.nan += 1

    def gradients(self, first: int, count: int, scale: float) -> tuple[float, float, list[Tensor]]:
        """Mean loss over the valid tokens of these samples, the number of those tokens, and the
        gradient of the mean objective. NaN where no token is valid.
        """
        c = self.c
        batch = batch_of(c, self.data, first, count)
        loss, lse = self.model.losses(self.state.weights, batch, training=True)
        objective = ((loss + c.z_loss_coeff * lse.square()) * batch.loss_mask).sum()
        # A narrow backward pass divides by all tokens, valid or not, and is set right afterwards.
        nominal, tokens = count * c.seq_length, float(batch.loss_mask.sum())
        # routers' losses are means over all tokens
        routers = sum(losses for losses, _ in self.model.routers.values())
        objective = objective + routers * (tokens / nominal)
        self.model.largest.clear()
        scaled = torch.autograd.grad(objective * (scale / nominal), self.trained)
        self.note_margin()
        mean = float((loss.detach() * batch.loss_mask).sum()) / tokens if tokens else math.nan
        factor = nominal / (tokens * scale) if tokens else math.nan
        return mean, tokens, [g * factor for g in scaled]

    def note_margin(self) -> None:
        """How near the last backward pass came to fp16's limit, from below or from above."""
        if self.c.fp16 and (largest := max(self.model.largest)) > 0:
            ratio = largest / torch.finfo(torch.float16).max
            self.margins.append(max(ratio, 1 / ratio))

    def update(
        self, gradients: list[Tensor], norm: float, rates: tuple[float, float], decay: float
    ) -> None:
        """Clip to the global norm and step, with the rate of most weights and the decoupled one."""
        clip = self.c.clip_grad
        coefficient = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
        for w, g in zip(self.trained, gradients, strict=True):
            w.grad = g * coefficient
        for group in self.optimizer.param_groups:
            group["lr"] = rates[group["decoupled"]]
            group["weight_decay"] = decay if group["decays"] else 0.0
        self.optimizer.step()

    def evaluate(self, split: str, title: str) -> None:
        """Losses of every source; of several also the blend's, their mean by weight."""
        sources = held_out_data(self.c, split, title)
        if not sources:
            return
        losses, sizes = [self.mean_loss(x) for x in sources], [x.bytes_per_token for x in sources]
        row = self.rows.setdefault(self.state.iteration, {})
        row["consumed_samples"] = self.state.consumed
        if len(sources) > 1:
            for source, loss, size in zip(sources, losses, sizes, strict=True):
                row |= evaluated(title, f" {source.name}", loss, size)
        weights = [source.weight / sum(x.weight for x in sources) for source in sources]
        size = None if None in sizes else dot(weights, sizes)
        row |= evaluated(title, "", dot(weights, losses), size)

    @torch.no_grad()
    def mean_loss(self, source: HeldOut) -> float:
        """Mean over the valid tokens of the first eval-iters x global-batch-size samples."""
        c = self.c
        batch = batch_of(c, source.reader, 0, c.eval_iters * c.global_batch_size)
        loss, _ = self.model.losses(self.state.weights, batch, training=False)
        return float((loss * batch.loss_mask).sum() / batch.loss_mask.sum())


def dot(weights: list[float], values: list[float]) -> float:
    """The mean of values by weights that add up to 1."""
    return sum(w * x for w, x in zip(weights, values, strict=True))


def evaluated(title: str, of: str, loss: float, bytes_per_token: float | None) -> dict[str, float]:
    """What is logged of an evaluation; `of` a source among several."""
    row = {f"lm loss {title}{of}": loss, f"lm loss {title} ppl{of}": math.exp(min(20.0, loss))}
    if title == "validation" and bytes_per_token:
        row[f"bits-per-byte{of}"] = loss / math.log(2) / bytes_per_token
    return row
