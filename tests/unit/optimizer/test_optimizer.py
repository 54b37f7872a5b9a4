"""The optimizer's storage, norms, schedules and loss scaling; update rules: test_update.py."""

import dataclasses
import math

import pytest
import torch

from megatron.config.groups import (
    Config,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainingConfig,
)
from megatron.distributed.groups import one_process
from megatron.model.gpt import GPTModel
from megatron.optimizer.lr_schedule import ParamSchedule
from megatron.optimizer.optimizer import PIECE, Optimizer, sum_of_squares
from megatron.optimizer.scaler import LossScaler
from megatron.parallel.blocks import ALIGNMENT, build_blocks
from megatron.parallel.zero import Zero

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=24,
    ffn_hidden_size=40,
    num_attention_heads=4,
    kv_channels=6,
    num_query_groups=2,
    max_position_embeddings=16,
    activation="swiglu",
)


def build(dtype=torch.float32, model=MODEL, **optimizer):
    config = Config(model=model, optimizer=OptimizerConfig(**optimizer))
    gpt = GPTModel(model, vocab_size=50, padded_vocab=64, dtype=dtype, seed=1)
    blocks, groups = build_blocks(gpt, torch.device("cpu")), one_process()
    opt = Optimizer(blocks, config, groups, Zero(gpt, blocks, groups, config.distributed))
    opt.initialise()
    opt.copy_masters_to_weights()
    return gpt, opt


def test_blocks_hold_every_parameter_once():
    for tied in (True, False):
        model = dataclasses.replace(MODEL, untie_embeddings_and_output_weights=not tied)
        gpt, opt = build(model=model)
        units = ["embedding", "layers.0", "layers.1", *([] if tied else ["head"])]
        assert [block.name for block in opt.blocks] == units
        names = [entry.name for block in opt.blocks for entry in block.entries]
        assert sorted(names) == sorted(name for name, _ in gpt.named_parameters())
        for block in opt.blocks:
            assert block.grad is None and block.parameters[0].main_grad is None
            block.open()
            end = 0
            for entry in block.entries:
                assert entry.start % ALIGNMENT == 0 and entry.start >= end
                end = entry.start + math.prod(entry.shape)
                parameter = dict(gpt.named_parameters())[entry.name]
                assert parameter.data_ptr() == entry.view(block.weight).data_ptr()
                assert parameter.main_grad.data_ptr() == entry.view(block.grad).data_ptr()
                group = next(each for stop, each in block.layout.ranges if entry.start < stop)
                assert group.decay == (parameter.dim() > 1)
    assert any("position" in name for name in names) and any("final_norm" in name for name in names)


def test_boxes_tile_every_parameter():
    """Every real element of every parameter belongs to exactly one logical tensor."""
    gpt, opt = build()
    for block in opt.blocks:
        for entry in block.entries:
            count = torch.zeros(entry.shape)
            for box in entry.boxes:
                box.view(count).add_(1)
                assert box.view(count).numel() == math.prod(box.extent)
            real = 50 if entry.name == "embedding.word.weight" else entry.shape[0]
            assert (count[:real] == 1).all() and (count[real:] == 0).all()


def test_norm_is_accumulated_in_float64():
    x = torch.full((3 * PIECE + 5,), 1e-3)
    expected = 2 * x.numel() * float(x[0]) ** 2
    assert sum_of_squares([x, x]).item() == pytest.approx(expected, rel=1e-13)


def test_num_zeros_leaves_padding_out():
    gpt, opt = build()
    for block in opt.blocks:
        block.open()
        block.grad.zero_()
        for _, view in block.boxes(block.grad):
            view.fill_(1)
    assert opt.count_zero_gradients() == 0
    gpt.layers["0"].mlp.fc1.weight.main_grad[3, 4:7] = 0
    assert opt.count_zero_gradients() == 3


def test_what_a_checkpoint_keeps_of_a_schedule():
    """Nothing of --decoupled-lr where it is not given, as before there was one."""
    training = TrainingConfig(global_batch_size=4, train_iters=100)
    cosine = OptimizerConfig(lr=1.5e-4, min_lr=1e-5, lr_decay_style="cosine", lr_decay_iters=100)
    one, two = (
        ParamSchedule.of(Config(training=training, optimizer=optimizer))
        for optimizer in (cosine, dataclasses.replace(cosine, decoupled_lr=1e-3))
    )
    assert two.state().keys() - one.state().keys() == {"decoupled_max_lr", "decoupled_min_lr"}
    constant = OptimizerConfig(lr=1e-3, lr_decay_style="constant", lr_decay_iters=50)
    by_samples = Config(training=TrainingConfig(train_samples=400), optimizer=constant)
    for each in (one, two, ParamSchedule.of(by_samples)):
        assert ParamSchedule(**each.state()) == each


# ---- loss scaling ----


def test_loss_scaler():
    scales = {"initial_loss_scale": 16.0, "min_loss_scale": 4.0, "hysteresis": 2}
    scaler = LossScaler(PrecisionConfig(fp16=True, loss_scale_window=3, **scales))
    seen = []
    for overflow in (True, True, True, False, False, False, True, True, True, True):
        scaler.update(overflow)
        seen.append(scaler.scale)
    assert seen == [16, 8, 4, 4, 4, 8, 8, 4, 4, 4] and not scaler.can_lower()
    twin = LossScaler(scaler.config)
    twin.load(scaler.state())
    assert vars(twin) == vars(scaler)
    largest = LossScaler(
        PrecisionConfig(fp16=True, initial_loss_scale=2.0**127, loss_scale_window=1)
    )
    largest.update(False)
    assert largest.scale == 2.0**127  # fp32 holds no larger power
    constant = LossScaler(PrecisionConfig(fp16=True, loss_scale=128.0))
    assert constant.scale == 128 and LossScaler(PrecisionConfig(bf16=True)).scale == 1
    with pytest.raises(AssertionError):
        constant.update(True)
