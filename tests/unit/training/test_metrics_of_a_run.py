"""Logged metrics against values computed here: rates from a clock that the test moves, norms of
layers, what routers log from the logits that they saw, and the time line of a pipeline.
"""

from __future__ import annotations

import math
import socket
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.tools._report.metrics_file import read_metrics
from megatron.tools.plot_schedule import measured_timeline
from own_run import exit_code, replaced
from parity import worker
from parity.layouts import BASE, LLAMA, NO_DROPOUT
from parity.worker import Outcome, run_case

from megatron.model.experts.router import Router
from megatron.observe.stragglers import StragglerWatch
from megatron.training import loop, reporting

L, H, S, B, V, PADDED = 2, 32, 16, 8, 50, 128
STEP_SECONDS, EVALUATION_SECONDS, PEAK = 2.0, 100.0, 5.0
Row = dict[str, float]


def rows_of(outcome: Outcome) -> list[Row]:
    """The rows of training."""
    return [row for row in outcome.metrics if "lm loss" in row]


# ---- rates

RATES = (
    *BASE,
    *NO_DROPOUT.split(),
    *"--micro-batch-size 2 --train-iters 4 --log-interval 2 --eval-interval 1".split(),
    *f"--peak-tflops {PEAK} --eod-mask-loss --reset-attention-mask".split(),
    *"--make-vocab-size-divisible-by 64".split(),
)


def run_by_clock(flags: tuple[str, ...]) -> list[Row]:
    """Rows of a run, measured values too, whose steps and evaluations take the seconds above."""
    now = [1000.0]
    train_step, evaluate_all = loop.train_step, loop.evaluate_all

    def step(*args):
        now[0] += STEP_SECONDS
        return train_step(*args)

    def evaluation(*args):
        now[0] += EVALUATION_SECONDS
        return evaluate_all(*args)

    clock = SimpleNamespace(**{**vars(loop.time), "perf_counter": lambda: now[0]})
    with (
        mock.patch.object(loop, "time", clock),
        mock.patch.object(reporting, "time", clock),
        mock.patch.object(loop, "train_step", step),
        mock.patch.object(loop, "evaluate_all", evaluation),
        mock.patch.object(worker, "is_measured", lambda name: False),
    ):
        return rows_of(run_case(flags))


def flops(vocabulary: int) -> float:
    """Of one iteration: 2 for each multiply-add, backward twice as many as forward, and of
    attention's two S x S matrix multiplications the causal half.
    """
    of_layer = 3 * H * H + H * H + 2 * H * 4 * H  # Q, K and V, projection, MLP
    attention = 2 * S * H / 2
    return 3 * 2 * B * S * (L * (of_layer + attention) + H * vocabulary)


@pytest.mark.parametrize(
    "ranks, precision, layout",
    [
        (1, "--fp64", ""),
        (1, "--fp16 --initial-loss-scale 1024", ""),
        (2, "--fp64", "--tensor-model-parallel-size 2"),
        (2, "--fp64", "--zero-stage 2"),
    ],
)
def test_rates_count_every_token_and_every_rank_and_no_pause(
    gloo_world, one_thread, ranks, precision, layout
):
    flags = (*RATES, *precision.split(), *layout.split())
    if ranks == 1:
        rows = run_by_clock(flags)
    else:
        rows = gloo_world(ranks).run(run_by_clock, flags)[0]
    padded = PADDED if "tensor" in layout else PADDED // 2
    assert len(rows) == 2
    for row in rows:
        assert row["iteration-time"] == STEP_SECONDS
        assert row["tokens-per-second-per-gpu"] == B * S / STEP_SECONDS / ranks
        assert row["throughput"] == pytest.approx(flops(padded) / 1e12 / STEP_SECONDS / ranks)
        assert row["mfu"] == pytest.approx(flops(V) / 1e12 / STEP_SECONDS / ranks / PEAK)
        assert row["consumed-tokens"] == row["consumed_samples"] * S


# ---- routers

EXPERTS, TOP, MICRO, FACTOR = 4, 2, 2, 0.8
COEFFICIENTS = {"aux_loss": 3e-2, "seq_aux_loss": 2e-2, "global_aux_loss": 4e-2}
Z_COEFFICIENT = 1e-2
ROUTED = (
    *BASE,
    *"--train-iters 2 --lr-warmup-iters 1".split(),
    *LLAMA.split(),
    *f"--fp64 --num-experts {EXPERTS} --moe-ffn-hidden-size 24 --moe-router-topk {TOP}".split(),
    *f"--micro-batch-size {MICRO} --moe-z-loss-coeff {Z_COEFFICIENT}".split(),
    "--moe-router-load-balancing-type",
    *COEFFICIENTS,
    "--moe-aux-loss-coeff",
    *map(str, COEFFICIENTS.values()),
    *f"--moe-expert-capacity-factor {FACTOR} --eval-iters 0".split(),
    *f"--num-layers {L + 1} --moe-layer-freq [1,0,1]".split(),  # L with experts
    "--eod-mask-loss",  # means over all tokens, whatever the loss leaves out
)


def balance(shares: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """E x the sum over experts of (share of choices) x (mean probability), of tokens [T, E]."""
    return EXPERTS * (chosen.mean(0) / TOP * shares.mean(0)).sum()


def choices(logits: torch.Tensor) -> torch.Tensor:
    """[T, E]: 1 where a token chooses an expert."""
    return torch.zeros_like(logits).scatter(1, logits.topk(TOP).indices, 1)


def routers_metrics(
    logits: list[list[torch.Tensor]], before: list[list[torch.Tensor]] | None
) -> Row:
    """Of a step, from the logits [s b, E] of each layer with experts and micro-batch, and those of
    the step before: means over these layers and tokens; loads over the whole step.
    """
    names = ("load-balancing-loss", "seq-load-balancing-loss", "global-load-balancing-loss")
    found = dict.fromkeys((*names, "router-z-loss", "objective"), 0.0)
    most, least, missed = 0.0, math.inf, 0.0
    for number, layer in enumerate(logits):
        loads = torch.zeros(EXPERTS)
        # the shares of all choices of the step before; before the first one equal shares
        held = torch.full((1, EXPERTS), TOP / EXPERTS)
        if before is not None:
            held = torch.cat([choices(each) for each in before[number]])
        for each in layer:
            shares, chosen = each.softmax(-1), choices(each)
            samples = zip(
                shares.view(S, MICRO, EXPERTS).unbind(1), chosen.view(S, MICRO, EXPERTS).unbind(1)
            )
            here = {
                "load-balancing-loss": balance(shares, chosen).item(),
                "seq-load-balancing-loss": sum(balance(*sample).item() for sample in samples)
                / MICRO,
                "global-load-balancing-loss": balance(shares, held).item(),
                "router-z-loss": each.logsumexp(-1).square().mean().item(),
            }
            for name, value in here.items():
                found[name] += value / len(layer) / L
            weighted = zip((*COEFFICIENTS.values(), Z_COEFFICIENT), here.values(), strict=True)
            found["objective"] += sum(c * value for c, value in weighted) / len(layer)
            count = chosen.sum(0)
            loads += count
            capacity = math.ceil(len(each) * TOP / EXPERTS * FACTOR)
            missed += (count - capacity).clamp(min=0).sum().item()
        mean = loads.mean()
        most, least = (
            max(most, (loads.max() / mean).item()),
            min(least, (loads.min() / mean).item()),
        )
    return {
        **{name: found[name] for name in (*names, "router-z-loss")},
        "router-objective": found["objective"],
        "expert-load-max": most,
        "expert-load-min": least,
        "expert-dropped": missed / (L * B * S * TOP),
    }


def run_with_logits() -> tuple[list[Row], list[torch.Tensor]]:
    seen: list[torch.Tensor] = []
    losses = Router.losses

    def recorded(self, logits, *others):
        if not logits.is_meta:  # else the planner measures the layer
            seen.append(logits.detach().clone())
        return losses(self, logits, *others)

    with mock.patch.object(Router, "losses", recorded):
        return rows_of(run_case(ROUTED)), seen


def test_routers_log_what_their_logits_say(one_thread):
    rows, seen = run_with_logits()
    micro_batches, steps = B // MICRO, 2
    assert len(rows) == steps and len(seen) == steps * micro_batches * L
    before = None
    for step, row in enumerate(rows):
        own = seen[step * micro_batches * L : (step + 1) * micro_batches * L]
        by_layer = [own[layer::L] for layer in range(L)]
        expected, before = routers_metrics(by_layer, before), by_layer
        assert expected["expert-dropped"] > 0
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-9), name


# ---- the compute time of ranks


def run_for_metrics(flags: tuple[str, ...]) -> str:
    """What a rank prints, whose watch is written into each training line."""

    def fields(watch: StragglerWatch, metrics: Row) -> list[str]:
        return [f"from {watch.threshold} on {len(watch.nodes)} x {watch.nodes[1]}"]

    with replaced((StragglerWatch, "fields", fields)) as printed:
        assert exit_code((*BASE, *"--micro-batch-size 4 --train-iters 2".split(), *flags)) == 0
    return printed.getvalue()


@pytest.mark.parametrize("flags", ["--straggler-threshold 0.25", "--no-log-straggler"])
def test_ranks_are_timed_unless_switched_off(gloo_world, tmp_path, flags):
    file = tmp_path / "metrics.jsonl"
    words = (*flags.split(), "--metrics-file", str(file))
    printed, _ = gloo_world(2).run(run_for_metrics, words)
    on = flags != "--no-log-straggler"
    assert (f"from 0.25 on 2 x {socket.gethostname()}" in printed) == on
    for row in read_metrics(file):
        timed = [name for name in row if name.startswith(("rank-time", "slowest-rank"))]
        assert ("rank-time-min" in timed) == on == bool(timed)


# ---- the time line of a pipeline


def test_a_time_line_is_kept_of_the_last_step(gloo_world, tmp_path):
    """In a folder that is made; on a disk that is full the run continues."""
    file, full = tmp_path / "made" / "timeline.json", tmp_path / "full.json"
    full.symlink_to("/dev/full")
    pipeline = "--micro-batch-size 2 --pipeline-model-parallel-size 2 --pipeline-timeline"
    for each in (file, full):
        gloo_world(2).run(run_case, (*BASE, *pipeline.split(), str(each)))
    line = measured_timeline(str(file))
    assert (line.schedule, line.placement, line.micro_batches) == ("1f1b", (0, 1), 4)
    assert [sorted((span.kind.value, span.micro) for span in row) for row in line.rows] == [
        [(kind, micro) for kind in "BF" for micro in range(4)]
    ] * 2
    assert line.end > line.begin and 0 <= line.bubble < 1
