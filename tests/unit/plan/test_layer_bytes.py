"""The bytes that a layer keeps and sends to the host, planned on the meta device, against the
storages that live when the forward passes of a real model are over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from megatron.tools._plan.activations import Shape, forget_passes, unit_bytes
from megatron.tools._plan.layer_run import LayerRun
from test_memory import DRY, GROUPED, KERNELS, LATENT, ROPE, VOCAB, configure, whole_model
from unit.by_hand import backward_input, forward, loss_gradient
from unit.storages import Storages
from unit.zero.measure import launches_of_nothing

from megatron.config.groups import Config, PrecisionConfig
from megatron.config.recompute import INSIDE
from megatron.model import layer as model_layer
from megatron.model.gpt import GPTModel
from megatron.model.stages import whole
from megatron.parallel import offload
from megatron.parallel.layer_runner import LayerRunner
from megatron.parallel.offload import OffloadingRunner, Pass, Route
from megatron.parallel.schedule import Kind

FP32, BF16 = PrecisionConfig(), PrecisionConfig(bf16=True)
LLAMA = {**DRY, **ROPE, **GROUPED, "activation": "swiglu", "normalization": "RMSNorm"}
PLAIN = {"attention_backend": "plain"}


def again(*modules: str) -> dict:
    """Flags that recompute these modules."""
    return {"recompute_granularity": "selective", "recompute_modules": modules}


CHEAP = again("layernorm", "mlp_act")
MOST = again("layernorm", "qkv", "core_attn", "mlp")
FULL = {"recompute_granularity": "full"}
OFFLOAD = {"activation_offload": True, "min_offloaded_tensor_size": 1}
# name: precision, model, training
ROWS: dict[str, tuple[PrecisionConfig, dict, dict]] = {
    "gpt, cheap modules again": (FP32, {}, CHEAP),
    "llama": (FP32, LLAMA, {}),
    "llama, most modules again": (FP32, LLAMA, MOST),
    "llama, bf16, whose attention is computed in fp32": (BF16, LLAMA, CHEAP),
    "llama, MLP in pieces": (FP32, {**LLAMA, "tiled_mlp": 4}, {}),
    "norms of queries, plain": (FP32, {**DRY, **GROUPED, **PLAIN, "qk_layernorm": True}, MOST),
    "window, squared relu": (FP32, {**DRY, "window_size": 8, "activation": "squared-relu"}, MOST),
    "geglu, dropout, MLP in pieces": (FP32, {"activation": "geglu", "tiled_mlp": 4}, MOST),
    "latent, up-projection again": (FP32, LATENT, again("layernorm", "mla_up_proj", "core_attn")),
    "latent, plain": (FP32, {**LATENT, **PLAIN, "q_lora_rank": None}, MOST),
    "llama, on the host": (FP32, LLAMA, OFFLOAD),
    "llama, large tensors of half of the layers on the host": (
        FP32,
        LLAMA,
        {**OFFLOAD, "min_offloaded_tensor_size": 1 << 14, "activation_offload_fraction": 0.5},
    ),
    "llama, inputs of attention on the host": (
        FP32,
        LLAMA,
        {**OFFLOAD, "offload_modules": ("qkv_linear", "core_attn", "attn_proj")},
    ),
    "llama, bf16, layer inputs on the host": (BF16, LLAMA, {**FULL, **OFFLOAD}),
}
OURS = {
    "llama, our kernels": (FP32, {**LLAMA, **KERNELS, "tiled_mlp": 4}, MOST),
    "latent, our kernels": (
        FP32,
        {**LATENT, **KERNELS, "rotary_backend": "auto"},
        again("layernorm", "mla_up_proj"),
    ),
}
MICRO_BATCHES = 2


def passes_of(model: GPTModel) -> list[Pass]:
    """Forward passes of all micro-batches, then their backward passes: all that may leave does."""
    layers = [layer for _, layer in model.layers_by_stage[0]]
    numbers = range(MICRO_BATCHES)
    return [
        *((layer, Kind.FORWARD, micro) for micro in numbers for layer in layers),
        *((layer, Kind.BACKWARD, micro) for micro in numbers for layer in reversed(layers)),
    ]


def alive(config: Config) -> tuple[int, int]:
    """(bytes that live on the device, bytes of buffers of the host) when the forward passes are
    over, without parameters and the micro-batches.
    """
    model, micro = whole_model(config)
    passes = OffloadingRunner(torch.device("cpu"), config.training.min_offloaded_tensor_size)
    passes.prepare_passes(Route(passes_of(model)))
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


def of_row(name: str) -> Config:
    precision, model, training = {**ROWS, **OURS}[name]
    return configure(precision, training=training, **model)


@pytest.mark.parametrize("name", ROWS)
def test_bytes_are_those_that_live(name):
    config = of_row(name)
    found = alive(config)
    assert found == planned(config)
    assert (found[1] > 0) == config.training.activation_offload


def test_forgotten_passes_are_run_again():
    """Including those that find which bytes go to the host."""
    config = of_row("llama, on the host")
    before = planned(config)
    forget_passes()
    with mock.patch.object(LayerRun, "leaving", lambda *_: ([1], False, False)):
        assert planned(config)[1] == MICRO_BATCHES * config.model.num_layers
    forget_passes()
    assert planned(config) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU tensors, which take the interpreter")
@pytest.mark.parametrize("name", OURS)
def test_bytes_with_our_kernels_are_those_that_live(name):
    config = of_row(name)
    assert alive(config) == planned(config)


@pytest.mark.parametrize("model", [LLAMA, LATENT], ids=["llama", "latent"])
def test_bytes_that_wait_for_weight_gradients_are_those_that_live(model):
    """Of backward passes in two halves."""
    config = configure(FP32, **model)
    split = config.with_fields("distributed", pipeline_schedule="zero-bubble")
    units = unit_bytes(Shape(split, VOCAB, "cpu"), whole(config.model)[0])
    model, micro = whole_model(config)
    passes = LayerRunner()
    with Storages() as storages:
        y, saved = forward(model, micro, passes)
        dy, left = backward_input(model, saved, loss_gradient(y, 1.0), passes)
        del y, dy, saved
        assert sum(storages.alive().values()) == sum(unit.deferred for unit in units)
    assert left


@pytest.mark.parametrize("module", INSIDE)
@pytest.mark.default("attn_proj", "mlp_act")
def test_each_module_has_bytes_of_its_own(module):
    """attn_proj's input is kept by core attention too, and stays without it."""
    config = of_row("llama, on the host").with_fields("training", offload_modules=(module,))
    on_device, host = alive(config)
    without = config.with_fields("training", activation_offload=False)
    assert (host > 0) == (module != "attn_proj")
    assert alive(without)[0] - on_device == host


# ---- faults that the count must see


@contextlib.contextmanager
def a_sent_storage_stays() -> Iterator[None]:
    let_go, kept = offload.HostCopies.let_go, []

    def forgetful(self, departed):
        kept.append(departed.storages[0].tensor)
        let_go(self, departed)

    with mock.patch.object(offload.HostCopies, "let_go", forgetful):
        yield


@contextlib.contextmanager
def a_piece_keeps_its_activation() -> Iterator[None]:
    rebuilt = frozenset({"mlp_act"})
    with mock.patch.object(model_layer, "always_rebuilt", lambda model: rebuilt):
        yield


@pytest.mark.parametrize(
    "fault, name",
    [
        (a_sent_storage_stays, "llama, on the host"),
        (a_piece_keeps_its_activation, "llama, MLP in pieces"),
    ],
)
def test_faults_are_seen(fault, name):
    config = of_row(name)
    right = planned(config)
    with fault():
        assert alive(config) != right
