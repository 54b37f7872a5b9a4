"""A unit's backward in two parts against the whole one, bit for bit, and what is alive between the
two.
"""

import dataclasses
import threading

import pytest
import torch
from unit.by_hand import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    backward,
    backward_input,
    backward_weight,
    forward,
    loss_gradient,
    recomputing,
)
from unit.storages import Storages, no_collector, of

from megatron.config.groups import ModelConfig
from megatron.model.gpt import GPTModel
from megatron.model.init import fill_initial
from megatron.model.layer import TransformerLayer
from megatron.parallel.blocks import build_blocks
from megatron.parallel.layer_runner import LayerRunner
from megatron.parallel.schedule import Kind

H, F, HEADS, D, S, B, VOCAB = 16, 24, 4, 4, 8, 2, 30
PLAIN = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
GPT = ModelConfig(
    num_layers=2,
    hidden_size=H,
    ffn_hidden_size=F,
    num_attention_heads=HEADS,
    kv_channels=D,
    num_query_groups=HEADS,
    max_position_embeddings=S,
)
CONFIGS = {
    "gpt": GPT,  # learned positions, GELU, biases, dropout everywhere, tied
    "gqa-swiglu": dataclasses.replace(
        GPT,
        **PLAIN,
        num_query_groups=2,
        activation="swiglu",
        normalization="RMSNorm",
        add_bias_linear=False,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
    ),
    "mqa-qknorm": dataclasses.replace(
        GPT,
        num_query_groups=1,
        qk_layernorm=True,
        add_bias_linear=False,
        add_qkv_bias=True,
        activation="squared-relu",
        position_embedding_type="rope",
    ),
}
RECOMPUTE = {
    "plain": NO_RECOMPUTE,
    "recompute": FULL_RECOMPUTE,
    "norms": recomputing("layernorm"),
    "activation": recomputing("mlp_act"),
    "attention": recomputing("core_attn"),
    "selective": recomputing("layernorm", "qkv", "core_attn", "mlp"),
}


def build(config, dtype=torch.float64, how="plain"):
    """A model with random gradients: a backward pass adds to what is there."""
    model = GPTModel(config, vocab_size=VOCAB, padded_vocab=32, dtype=dtype, seed=5)
    for block in build_blocks(model, torch.device("cpu")):
        for entry in block.entries:
            for box in entry.boxes:
                fill_initial(box, entry.view(block.weight), 5)
        block.open()
        block.grad.normal_(generator=torch.Generator().manual_seed(6))
        for parameter in block.parameters:
            parameter.overwrite_main_grad = False
    model.choose_recompute(RECOMPUTE[how])
    return model


def micro_batch(model, number=0):
    ids = torch.randint(0, VOCAB, (B, S + 1), generator=torch.Generator().manual_seed(number))
    samples = number * B + torch.arange(B)
    return model.micro_batch(
        ids[:, :-1],
        ids[:, 1:],
        torch.ones(B, S),
        torch.arange(S).expand(B, S),
        samples,
        training=True,
    )


def gradients(model):
    return {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}


def start(model, passes, number):
    """(gradient of the loss, what the forward pass saved)."""
    y, saved = forward(model, micro_batch(model, number), passes)
    return loss_gradient(y, 0.5), saved


def whole(model, passes, micro_batches):
    for number in range(micro_batches):
        dy, saved = start(model, passes, number)
        backward(model, saved, dy, passes)


def split(model, passes, micro_batches):
    """All B, then all W: micro-batches overlap, each gradient still adds in their order."""
    left = []
    for number in range(micro_batches):
        dy, saved = start(model, passes, number)
        left += backward_input(model, saved, dy, passes)[1]
    backward_weight(left, passes)


def check_equal(name, how, micro_batches=1):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model = build(CONFIGS[name], dtype)
        before = gradients(model)
        whole(model, LayerRunner(), micro_batches)
        expected = gradients(model)
        model.choose_recompute(RECOMPUTE[how])
        for parameter_name, parameter in model.named_parameters():
            parameter.main_grad.copy_(before[parameter_name])
        split(model, LayerRunner(), micro_batches)
        for parameter_name, got in gradients(model).items():
            assert torch.equal(got, expected[parameter_name]), (dtype, parameter_name)
            assert not torch.equal(got, before[parameter_name]), (dtype, parameter_name)


@pytest.mark.parametrize("how", RECOMPUTE)
@pytest.mark.parametrize("name", CONFIGS)
def test_two_parts_are_the_whole(name, how):
    check_equal(name, how, micro_batches=2)


def test_the_backward_may_run_in_another_thread(monkeypatch):
    """As autograd's does on a GPU."""
    backward = torch.autograd.backward

    def elsewhere(*args):
        thread = threading.Thread(target=backward, args=args)
        thread.start()
        thread.join()

    monkeypatch.setattr(torch.autograd, "backward", elsewhere)
    check_equal("gpt", "plain")


@pytest.mark.parametrize("how", RECOMPUTE)
@pytest.mark.parametrize("name", CONFIGS)
@no_collector()
def test_inputs_and_output_gradients_alone_stay(name, how):
    """After B of a layer the inputs of its linear layers and the gradients of their outputs are
    alive, nothing else of either pass.
    """
    config = CONFIGS[name]
    model, passes = build(config, how=how), LayerRunner()
    micro = micro_batch(model)
    draw = torch.Generator().manual_seed(1)
    for layer_name, unit in model.named_layers():
        if not isinstance(unit, TransformerLayer):
            continue
        with Storages() as storages:
            x, dy = (torch.randn(S, B, H, dtype=torch.float64, generator=draw) for _ in range(2))
            y, saved = passes.forward(unit, x, micro)
            output = of(y)
            del x, y
            # a unit's output lives with its reader
            assert storages.settle(lambda alive, output=output: not output & alive.keys()), (
                layer_name
            )
            entry = [saved]
            del saved
            dx, kept = passes.backward(Kind.BACKWARD_INPUT, unit, dy, entry.pop())
            deferred = of(*(t for left in kept for t in (left.x, left.dy)))
            assert storages.settle(
                lambda alive, expected=deferred | of(dx, dy): alive.keys() == expected
            ), layer_name
            assert sum(storages.alive()[key] for key in deferred) == least_bytes(config), layer_name
            passes.backward(Kind.BACKWARD_WEIGHT, unit, None, kept)
            assert kept == [] and storages.settle(
                lambda alive, expected=of(dx, dy): alive.keys() == expected
            ), layer_name


def least_bytes(config):
    """x and dy of four linear layers of a float64 model."""
    gated = 2 if config.activation == "swiglu" else 1
    outside = 2 * 2 * H  # qkv and fc1's x, proj and fc2's dy
    inside = (HEADS + 2 * config.num_query_groups) * D + HEADS * D + (gated + 1) * F
    return 8 * S * B * (outside + inside)
