"""Initial values and weight decay of every tensor of latent attention, by its name (the oracle has
those of the other models): what a run starts from, and what one step takes off it.
"""

import math
import re

import pytest
import torch
from parity.layouts import BASE, FEATURES
from parity.worker import run_case

STD, LR, DECAY = 0.3, 1e-3, 0.5
FLAGS = (
    *BASE,
    *f"--fp64 --train-iters 1 --init-method-std {STD} --micro-batch-size 8 --eval-iters 0".split(),
    *f"--lr {LR} --lr-warmup-iters 0 --lr-decay-style constant --attention-dropout 0".split(),
    *"--hidden-dropout 0 --moe-input-jitter-eps 0".split(),
)
KINDS = {
    "latent": FEATURES["mla"].flags,
    "latent with biases": FEATURES["mla-bias"].flags,
    "latent with experts": FEATURES["mla-moe"].flags,
}
# matrices whose outputs are added to the residual stream
RESIDUAL = re.compile(
    r"(attention\.proj|mlp\.down|shared_expert\.down|experts\.\d+\.down)\.weight$"
)
NORM = re.compile(r"norm\.weight$")
STATE = re.compile(r"router\.expert_(bias|share)$")  # kept, not trained


def weights(kind: str, lr: float, decay: float) -> dict[str, torch.Tensor]:
    flags = f"{KINDS[kind]} --lr {lr} --weight-decay {decay}".split()
    outcome = run_case((*FLAGS, *flags))
    return {piece.name: piece.values for piece in outcome.weights}


@pytest.mark.parametrize("kind", KINDS)
def test_initial_values_and_weight_decay(one_thread, kind):
    """Matrices are drawn with the given standard deviation, over sqrt(2 layers) where they write to
    the residual stream; norms begin at 1, biases at 0; matrices alone decay. Of n normal numbers
    the sample's deviation is off by 1 / sqrt(2 n), its mean by 1 / sqrt(n), relative to the
    deviation; 5 of these.
    """
    tiny = 1e-12  # a step of Adam moves nothing
    layers = int(re.findall(r"--num-layers (\d)", f"{' '.join(FLAGS)} {KINDS[kind]}")[-1])
    first = weights(kind, tiny, 0.0)
    without, decayed = weights(kind, LR, 0.0), weights(kind, LR, DECAY)
    for name, w in first.items():
        if STATE.search(name):
            continue
        off = without[name] - decayed[name]
        share = LR * DECAY if w.dim() > 1 else 0.0
        assert (off - share * w).abs().max() < 1e-9 * LR, f"{name}: weight decay"
        if w.dim() == 1:
            start = 1.0 if NORM.search(name) else 0.0
            assert (w - start).abs().max() < 10 * tiny, f"{name}: initial value"
            continue
        std = STD / math.sqrt(2 * layers) if RESIDUAL.search(name) else STD
        n = w.numel()
        assert abs(w.std().item() / std - 1) < 5 / math.sqrt(2 * n), f"{name}: deviation"
        assert abs(w.mean().item()) < 5 * std / math.sqrt(n), f"{name}: mean"
    assert any(RESIDUAL.search(name) for name in first)
