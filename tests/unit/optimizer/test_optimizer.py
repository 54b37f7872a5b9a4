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
from megatron.optimizer.lr_schedule import ParamSchedule, global_batch_size_at
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


def test_initial_weights():
    gpt, opt = build(dtype=torch.float64)
    weights = dict(gpt.named_parameters())
    words = weights["embedding.word.weight"]
    assert (words[50:] == 0).all() and (words[:50] != 0).all()
    assert abs(weights["layers.0.mlp.fc1.weight"].std() - 0.02) < 0.002
    assert abs(weights["layers.0.mlp.fc2.weight"].std() - 0.02 / 2) < 0.001  # two layers: sqrt(4)
    assert (weights["layers.0.input_norm.weight"] == 1).all()
    assert (weights["layers.0.mlp.fc1.bias"] == 0).all()
    wider = build(dtype=torch.float32)[1]
    for (_, a), (_, b) in zip(opt.weight_boxes(), wider.weight_boxes()):
        assert torch.equal(a, b.double())  # one set of initial weights for every precision


def test_who_takes_the_decoupled_rate():
    """The matrices of the vocabulary; not learned positions, which are an embedding, too."""
    for tied in (True, False):
        model = dataclasses.replace(MODEL, untie_embeddings_and_output_weights=not tied)
        gpt, _ = build(model=model)
        taking = [name for name, _, spec in gpt.declared() if spec.param_group.decoupled_lr]
        assert taking == ["embedding.word.weight"] + ([] if tied else ["head.weight"])
        assert "layers.0.position.weight" in dict(gpt.named_parameters())


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


# ---- schedules ----


def schedule(style="cosine", **optimizer):
    lengths = {"lr_warmup_iters": 10, "lr_decay_iters": 100}
    flags = {"lr": 1.5e-4, "min_lr": 1e-5, "lr_decay_style": style, **lengths, **optimizer}
    training = TrainingConfig(global_batch_size=4, train_iters=100)
    return ParamSchedule.of(Config(training=training, optimizer=OptimizerConfig(**flags)))


def test_cosine_example():
    s = schedule()
    expected = {1: 1.5e-5, 5: 7.5e-5, 10: 1.5e-4, 50: 9.215537e-5, 100: 1e-5, 101: 1e-5}
    rates = {i: s.learning_rate(4 * i) for i in expected}
    assert rates == pytest.approx(expected, rel=1e-6)


def test_other_shapes():
    """At the middle of each decay; whole runs of every shape: tests/oracle."""
    root = 1.5e-4 * math.sqrt(40 / 160)
    for s, samples, rate in (
        (schedule("constant"), 4000, 1.5e-4),
        (schedule("linear"), 4 * 55, 8e-5),
        (schedule("inverse-square-root"), 160, root),
        (schedule("WSD", lr_wsd_decay_style="linear", lr_wsd_decay_iters=20), 4 * 90, 8e-5),
        (schedule("cosine", lr_warmup_init=1e-6), 4, 1e-6 + (1.5e-4 - 1e-6) * 0.1),
        (schedule("cosine", lr_warmup_iters=0, lr_warmup_fraction=0.2), 40, 0.75e-4),
    ):
        assert s.learning_rate(samples) == pytest.approx(rate)


def test_what_a_checkpoint_keeps_of_a_schedule():
    """Nothing of --decoupled-lr where it is not given, as before there was one."""
    one, two = schedule(), schedule(decoupled_lr=1e-3)
    assert two.state().keys() - one.state().keys() == {"decoupled_max_lr", "decoupled_min_lr"}
    constant = OptimizerConfig(lr=1e-3, lr_decay_style="constant", lr_decay_iters=50)
    by_samples = Config(training=TrainingConfig(train_samples=400), optimizer=constant)
    for each in (one, two, ParamSchedule.of(by_samples)):
        assert ParamSchedule(**each.state()) == each


def test_iterations_count_through_the_ramp_up():
    """With --rampup-batch-size the decay of --lr-decay-iters still ends at that iteration, not
    where full batches would have.
    """
    training = TrainingConfig(global_batch_size=8, train_iters=10, rampup_batch_size=(2, 2, 12))
    lengths = {"lr_decay_iters": 10, "lr_warmup_iters": 2}
    optimizer = OptimizerConfig(lr=1.0, min_lr=0.1, lr_decay_style="cosine", **lengths)
    config = Config(training=training, optimizer=optimizer)
    s = ParamSchedule.of(config)
    consumed = [0]
    for _ in range(10):
        consumed.append(consumed[-1] + global_batch_size_at(consumed[-1], config))
    assert consumed[:4] == [0, 2, 4, 8] and s.warmup == 4 and s.decay == consumed[10] == 14 + 8 * 6
    rates = [s.learning_rate(samples) for samples in consumed]
    assert rates[2] == 1.0 and rates[9] > 0.1 and rates[10] == pytest.approx(0.1)


# ---- loss scaling ----


def test_loss_scaler():
    scales = {"initial_loss_scale": 16.0, "min_loss_scale": 4.0, "hysteresis": 2}
    scaler = LossScaler(PrecisionConfig(fp16=True, loss_scale_window=3, **scales))
    seen = []
    for overflow in (True, True, True, False, False, False, True, True, True, True):
        scaler.update(overflow)
        seen.append(scaler.scale)
    assert seen == [16, 8, 4, 4, 4, 8, 8, 4, 4, 4] and scaler.at_minimum()
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
