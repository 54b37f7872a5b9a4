"""The bytes that a layer keeps and sends to the host, planned on the meta device, against the
storages that live when the forward passes of a real model are over.
"""

from __future__ import annotations

import pytest
import torch
from megatron.tools._plan.activations import Shape, unit_bytes
from memory_models import DRY, GROUPED, LATENT, LLAMA, VOCAB, configure, whole_model
from unit.by_hand import backward_input, forward, loss_gradient
from unit.storages import Storages
from unit.zero.measure import launches_of_nothing

from megatron.config.groups import Config
from megatron.config.recompute import INSIDE
from megatron.model.gpt import GPTModel
from megatron.model.stages import whole
from megatron.parallel.layer_runner import LayerRunner
from megatron.parallel.offload import OffloadingRunner, Pass, Route
from megatron.parallel.schedule import Kind

PLAIN = "--attention-backend plain"
KERNELS = " ".join(
    f"--{operator}-backend triton"
    for operator in ("attention", "norm", "activation", "dropout", "cross-entropy")
)
AGAIN = "--recompute-granularity selective --recompute-modules"
CHEAP, MOST = f"{AGAIN} layernorm mlp_act", f"{AGAIN} layernorm qkv core_attn mlp"
FULL = "--recompute-granularity full"
OFFLOAD = "--activation-offload --min-offloaded-tensor-size 1"
LARGE = "--min-offloaded-tensor-size 16384 --activation-offload-fraction 0.5"
ROWS = {
    "gpt, cheap modules again": CHEAP,
    "llama": LLAMA,
    "llama, most modules again": f"{LLAMA} {MOST}",
    "llama, bf16, whose attention is computed in fp32": f"{LLAMA} --bf16 {CHEAP}",
    "llama, MLP in pieces": f"{LLAMA} --tiled-mlp 4",
    "norms of queries, plain": f"{DRY} {GROUPED} {PLAIN} --qk-layernorm {MOST}",
    "window, squared relu": f"{DRY} --window-size 8 --activation squared-relu {MOST}",
    "geglu, dropout, MLP in pieces": f"--geglu --tiled-mlp 4 {MOST}",
    "latent, up-projection again": (
        f"{LATENT} --q-lora-rank 24 {AGAIN} layernorm mla_up_proj core_attn"
    ),
    "latent, plain": f"{LATENT} {PLAIN} {MOST}",
    "llama, on the host": f"{LLAMA} {OFFLOAD}",
    "llama, large tensors of half of the layers on the host": f"{LLAMA} {OFFLOAD} {LARGE}",
    "llama, inputs of attention on the host": (
        f"{LLAMA} {OFFLOAD} --offload-modules qkv_linear core_attn attn_proj"
    ),
    "llama, bf16, layer inputs on the host": f"{LLAMA} --bf16 {FULL} {OFFLOAD}",
}
OURS = {
    "llama, our kernels": f"{LLAMA} {KERNELS} --rotary-backend triton --tiled-mlp 4 {MOST}",
    "latent, our kernels": f"{LATENT} --q-lora-rank 24 {KERNELS} {AGAIN} layernorm mla_up_proj",
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
    return configure({**ROWS, **OURS}[name])


@pytest.mark.parametrize("name", ROWS)
def test_bytes_are_those_that_live(name):
    config = of_row(name)
    found = alive(config)
    assert found == planned(config)
    assert (found[1] > 0) == config.training.activation_offload


@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU tensors, which take the interpreter")
@pytest.mark.parametrize("name", OURS)
def test_bytes_with_our_kernels_are_those_that_live(name):
    config = of_row(name)
    assert alive(config) == planned(config)


@pytest.mark.parametrize("model", [LLAMA, LATENT], ids=["llama", "latent"])
def test_bytes_that_wait_for_weight_gradients_are_those_that_live(model):
    """Of backward passes in two halves."""
    config = configure(model)
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


def kept_bytes(config: Config) -> int:
    """Bytes of the storages alive between forward and backward, on this rank."""
    model, micro = whole_model(config)
    with Storages() as storages:
        y, saved = forward(model, micro)
        del y
        return sum(storages.alive().values())


@pytest.mark.parametrize(
    "model", ["", f"{LLAMA} --sequence-parallel", f"{LATENT} --sequence-parallel"]
)
def test_bytes_of_tensor_parallel_ranks_are_those_that_live(gloo_world, model):
    config = configure(f"{model} --tensor-model-parallel-size 2", 2)
    units = unit_bytes(Shape(config, VOCAB, "cpu"), whole(config.model)[0])
    expected = sum(unit.saved + unit.logits for unit in units)
    assert gloo_world(2).run(kept_bytes, config) == [expected] * 2
