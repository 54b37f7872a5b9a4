"""What leaves the device for the host, and what stays there, to the byte: against the storages that
live when the forward passes of two micro-batches are over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from megatron.tools._plan.activations import Shape, unit_bytes
from test_memory import BATCH, DRY, SEQ, VOCAB, configure, interpreted
from test_recompute_bytes import BF16, FP32, LLAMA, MODELS, OURS, model_and_micro_batch
from unit.by_hand import forward
from unit.storages import Storages
from unit.zero.measure import launches_of_nothing

from megatron.config.groups import Config
from megatron.config.offload import INSIDE
from megatron.model.gpt import GPTModel
from megatron.model.stages import whole
from megatron.parallel import offload
from megatron.parallel.offload import OffloadingRunner, Pass
from megatron.parallel.schedule import Kind

MICRO_BATCHES = 2
CHOICES: dict[str, dict] = {
    "all": {},
    "attention": {"offload_modules": ("qkv_linear", "core_attn", "attn_proj")},
    "core attention alone": {"offload_modules": ("core_attn",)},
    "norms": {"offload_modules": ("attn_norm", "mlp_norm")},
    "mlp": {"offload_modules": ("mlp_fc1", "mlp_act", "mlp_fc2")},
    "half of the layers": {"activation_offload_fraction": 0.5},
    "none of the layers": {"activation_offload_fraction": 0.0},
    "large ones": {"min_offloaded_tensor_size": 1 << 14},
    "with norms and activation that are rebuilt": {
        "recompute_granularity": "selective",
        "recompute_modules": ("layernorm", "mlp_act"),
    },
    "with attention and MLP that are rebuilt": {
        "recompute_granularity": "selective",
        "recompute_modules": ("layernorm", "qkv", "core_attn", "mlp"),
    },
    "with core attention that is rebuilt": {
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn",),
    },
    "layer inputs": {"recompute_granularity": "full", "recompute_num_layers": 1},
}


def offloading(precision=FP32, choice: str = "all", **model) -> Config:
    training = {"activation_offload": True, "min_offloaded_tensor_size": 1, **CHOICES[choice]}
    return configure(precision, training=training, **model)


def passes_of(model: GPTModel) -> list[Pass]:
    """Forward passes of all micro-batches, then their backward passes: all that may leave does."""
    layers = [layer for _, layer in model.chunks[0]]
    numbers = range(MICRO_BATCHES)
    return [
        *((layer, Kind.FORWARD, micro) for micro in numbers for layer in layers),
        *((layer, Kind.BACKWARD, micro) for micro in numbers for layer in reversed(layers)),
    ]


def alive(config: Config) -> tuple[int, int]:
    """(bytes that live on the device, bytes of buffers of the host) when the forward passes are
    over, without parameters and the micro-batches.
    """
    model, micro = model_and_micro_batch(config)
    passes = OffloadingRunner(torch.device("cpu"), config.training.min_offloaded_tensor_size)
    passes.prepare_passes(passes_of(model))
    kept = []
    with launches_of_nothing(), Storages() as storages:
        for _ in range(MICRO_BATCHES):
            y, saved = forward(model, micro, passes)
            kept.append(saved)
            del y
        total = sum(storages.alive().values())
    host = sum(passes.copies.pool.made)
    leaf = 0 if passes.one is None else passes.one.nbytes
    return total - host - leaf, host


def planned(config: Config) -> tuple[int, int]:
    """The same as planned."""
    shape = Shape(config, VOCAB, "cpu")
    device_bytes = host = 0
    for unit in unit_bytes(shape, whole(config.model)[0]):
        device_bytes += unit.saved + unit.logits
        if unit.leaving is not None:
            device_bytes -= unit.leaving.total + unit.leaving.input_is_unread * shape.hidden
            host += unit.leaving.total
    return MICRO_BATCHES * device_bytes, MICRO_BATCHES * host


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", ["without attention dropout", "llama"])
def test_bytes_by_choice(name, choice):
    config = offloading(choice=choice, **MODELS[name])
    found = alive(config)
    assert found == planned(config)
    assert (found[1] == 0) == (choice == "none of the layers")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.default("gpt", "rotary", "grouped norms, plain", "soft cap", "one group", "geglu")
def test_bytes_by_model(name):
    config = offloading(**MODELS[name])
    assert alive(config) == planned(config)


@interpreted
@pytest.mark.parametrize("name", ["gpt", "llama", "norms of queries"])
def test_bytes_with_our_kernels(name):
    config = offloading(**OURS[name])
    assert alive(config) == planned(config)


def test_all_that_a_layer_keeps_leaves():
    """But for masks of dropout, of which there are none here, and what the final norm reads."""
    config = offloading(**{**LLAMA, "hidden_dropout": 0.0})
    shape = Shape(config, VOCAB, "cpu")
    last = unit_bytes(shape, whole(config.model)[0])[2]
    numbers = SEQ * BATCH * 4  # of the final norm
    assert last.leaving is not None
    assert last.leaving.total == last.saved - shape.hidden - numbers


@pytest.mark.parametrize("module", INSIDE)
def test_each_module_has_bytes_of_its_own(module):
    """attn_proj's input is kept by core attention too, and stays without it."""
    config = offloading(**LLAMA).with_fields("training", offload_modules=(module,))
    on_device, host = alive(config)
    without = config.with_fields("training", activation_offload=False)
    assert (host > 0) == (module != "attn_proj")
    assert alive(without)[0] - on_device == host


# ---- faults that the count must see


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """The device keeps one storage that has been sent."""
    let_go, kept = offload.HostCopies.let_go, []

    def forgetful(self, departed):
        kept.append(departed.storages[0].tensor)
        let_go(self, departed)

    with mock.patch.object(offload.HostCopies, "let_go", forgetful):
        yield


@contextlib.contextmanager
def each_reader_its_own() -> Iterator[None]:
    """A storage that several tensors share is sent once for each."""
    going = offload.OffloadingRunner._going

    def separately(self, layer, micro, parked):
        return [storage for each in parked for storage in going(self, layer, micro, [each])]

    with mock.patch.object(offload.OffloadingRunner, "_going", separately):
        yield


@contextlib.contextmanager
def graph_keeps_the_input() -> Iterator[None]:
    """The leaf of a layer's graph is its input, as without offload."""

    def entry(self, x):
        leaf = None if x is None else x.detach().requires_grad_()
        return leaf, leaf

    with mock.patch.object(offload.OffloadingRunner, "_entry", entry):
        yield


@pytest.mark.parametrize("fault", [keeping, each_reader_its_own, graph_keeps_the_input])
def test_faults_are_seen(fault):
    config = offloading(**LLAMA)
    right = alive(config)
    with fault():
        assert alive(config) != right


def test_in_bf16_on_a_cpu():
    config = offloading(BF16, **{**DRY, **LLAMA})
    assert alive(config) == planned(config)
