"""A flipped bit of one replica is found and named in every layout; after real training steps no
layout raises a false alarm.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from reshard_cases import BASE, FEATURES, LAYOUTS, differing, saved, start

from megatron.checkpoint import desync
from megatron.checkpoint.desync import DesyncCheck, position_sum
from megatron.checkpoint.manifest import list_iterations
from megatron.checkpoint.ranks import Ranks
from megatron.optimizer.optimizer import Optimizer
from megatron.training import checkpointing, loop
from megatron.training.loop import train
from megatron.training.run import Run

WORDS = 1 << 10
MORE = LAYOUTS | {"dp4": (4, "")}


def flip(optimizer: Optimizer, kind: str, tensor: str) -> None:
    """Change the lowest bit of an element of a logical tensor in the part that this rank holds; the
    same again undoes it.
    """
    for block in optimizer.blocks:
        held = optimizer.states[block]
        buffer, first = (
            (block.weight, 0)
            if kind == "weights"
            else (held["master" if kind == "master weights" else kind], block.own[0])
        )
        for entry in block.entries:
            for box in entry.boxes:
                for low, high, _ in entry.runs(box) if box.name == tensor else ():
                    at = min(high, first + len(buffer)) - 1
                    if at >= max(low, first):
                        buffer.detach()[at - first : at - first + 1].view(torch.uint8)[0] ^= 1
                        return
    raise AssertionError(f"{tensor} ({kind}): nothing of it here")


def probe(arguments: tuple[str, ...], flips: list[tuple[int, str, str]]) -> list[str | None]:
    """Train, then check all replicas: as they are, and with each of `flips` (rank, kind, tensor) in
    turn. The errors, by rank.
    """
    errors: list[str | None] = []

    def check(run: Run, flips: Iterator) -> None:
        for rank, *what in flips:
            if rank == run.groups.rank:
                flip(run.optimizer, *what)
            try:
                DesyncCheck(run.optimizer).check(Ranks(run.groups.world, run.device))
                errors.append(None)
            except ValueError as error:
                errors.append(str(error))
            if rank == run.groups.rank:
                flip(run.optimizer, *what)

    def instead(run: Run):
        exit_ = train(run)
        run.zero.wait_for_weights()
        check(run, [(-1,), *flips, (-1,)])
        return exit_

    text = start(arguments, instead=instead)
    assert errors, text
    return errors


def outcomes(gloo_world, feature: str, layout: str, flips: list) -> list[str | None]:
    ranks, flags = MORE[layout]
    arguments = (*BASE, *FEATURES[feature].split(), *flags.split(), "--train-iters", "2")
    per_rank = gloo_world(ranks).run(probe, arguments, flips)
    assert all(errors == per_rank[0] for errors in per_rank)
    return per_rank[0]


EMBEDDING, NORM = "embedding.word.weight", "layers.1.input_norm.weight"
MATRIX, KEYS = "layers.1.mlp.up.weight", "layers.0.attention.k.weight"
BETWEEN = "differs between rank {} and rank {}"
# by feature and layout: rank with the wrong bit, kind, tensor, how the error describes it
FLIPS = {
    ("tied-bf16", "dp4"): [
        (2, "weights", MATRIX, "differs between ranks 0-1, 3 and rank 2"),
        (1, "master weights", MATRIX, "differs between ranks 0, 2-3 and rank 1"),
        (3, "exp_avg", EMBEDDING, "differs between ranks 0-2 and rank 3"),
        (0, "exp_avg_sq", NORM, "differs between ranks 1-3 and rank 0"),
    ],
    ("tied-bf16", "dp2zero1"): [(1, "weights", NORM, BETWEEN.format(0, 1))],
    ("tied-bf16", "dp4zero3shard2"): [(3, "master weights", MATRIX, BETWEEN.format(1, 3))],
    # fewer key/value heads than ranks, padding of the vocabulary
    ("mqa-fp64", "tp2sp"): [
        (1, "exp_avg", KEYS, BETWEEN.format(0, 1)),
        (1, "exp_avg", NORM, BETWEEN.format(0, 1)),
    ],
    # both ends of the pipeline hold a tied matrix
    ("tied-bf16", "pp2"): [(1, "weights", EMBEDDING, BETWEEN.format(0, 1))],
    # a schedule that splits the backward pass
    ("tied-bf16", "pp2zbv"): [],
    ("tied-bf16", "pp2dp2zero2"): [
        (3, "master weights", EMBEDDING, BETWEEN.format(1, 3)),
        (0, "weights", EMBEDDING, BETWEEN.format(0, 2)),
    ],
}


@pytest.mark.parametrize(("feature", "layout"), FLIPS)
def test_a_flipped_bit_is_named_on_every_rank(gloo_world, feature, layout):
    """And after real steps there is no false alarm."""
    flips = FLIPS[feature, layout]
    before, *found, after = outcomes(gloo_world, feature, layout, [flip[:3] for flip in flips])
    assert before is None and after is None
    for error, (_, kind, tensor, how) in zip(found, flips, strict=True):
        named = "layers.1.mlp.fc1.weight" if tensor == MATRIX else tensor
        assert error.startswith("replicas have diverged: ") and f"{named} ({kind}) {how}" in error


def save_with_a_flip(arguments: tuple[str, ...]) -> str:
    """A run in which rank 1 holds a wrong bit while iteration 4 is saved."""

    def flipping(run: Run, **place: bool) -> None:
        wrong = run.groups.rank == 1 and run.progress.iteration == 4
        if wrong:
            flip(run.optimizer, "exp_avg", MATRIX)
        checkpointing.save(run, **place)
        if run.checkpoints.pending is not None:
            run.checkpoints.before_update()  # from here on tensors may change
        if wrong:
            flip(run.optimizer, "exp_avg", MATRIX)

    with mock.patch.object(loop, "save", flipping):
        return start(arguments)


@pytest.mark.parametrize("mode", [(), ("--async-save",)])
def test_a_run_does_not_save_what_has_diverged_and_goes_on(gloo_world, tmp_path, mode):
    arguments = (*BASE, *FEATURES["tied-bf16"].split(), *mode, "--save-interval", "2", "--save")
    text, _ = gloo_world(2).run(save_with_a_flip, (*arguments, str(tmp_path / "flipped")))
    assert (
        "warning: iteration 4 was NOT saved. replicas have "
        "diverged: layers.1.mlp.fc1.weight (exp_avg)"
    ) in text
    assert list_iterations(tmp_path / "flipped") == [6, 2] and text.endswith("exit code 0")
    gloo_world(2).run(start, (*arguments, str(tmp_path / "right")))
    assert list_iterations(tmp_path / "right") == [6, 4, 2]
    assert differing(*(saved(tmp_path / name, 6) for name in ("flipped", "right"))) == []


# ---- the arithmetic ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sums_of_a_device_see_every_bit_and_every_place(monkeypatch, dtype):
    """Formed here on the CPU."""
    torch.manual_seed(2)
    monkeypatch.setattr(desync, "WORDS", WORDS)
    data = torch.randn(2 * WORDS + 64).to(dtype)
    words = data.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
    bits = 8 * words.element_size()

    def total(before: int = 7) -> int:
        return position_sum(data, torch.tensor(before)).item()

    whole = total()
    assert total() == whole != total(8)
    for a, b in ((0, 1), (5, 5 + WORDS), (WORDS, len(words) - 1)):
        assert words[a] != words[b]
        words[[a, b]] = words[[b, a]]
        assert total() != whole
        words[[a, b]] = words[[b, a]]
    for bit in range(bits):
        mask = torch.tensor(1 << bit if bit < bits - 1 else -1 << bit, dtype=words.dtype)
        for at in (3, WORDS + 9):  # two signs, too, which cancel in a sum that wraps
            words[at] ^= mask
            assert total() != whole
        words[[3, WORDS + 9]] ^= mask
    assert total() == whole
