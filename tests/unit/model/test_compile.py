"""--torch-compile: what is compiled, how often, and what a compiled layer keeps."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from megatron.config.groups import ModelConfig
from megatron.model import compile
from megatron.model.gpt import GPTModel
from megatron.model.layer import MicroBatch, TransformerLayer
from pretrain_gpt import main

S, B, H = 32, 2, 64
GPT = ModelConfig(
    num_layers=3,
    hidden_size=H,
    ffn_hidden_size=176,
    num_attention_heads=4,
    kv_channels=16,
    num_query_groups=2,
    max_position_embeddings=S,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
LLAMA = dataclasses.replace(
    GPT,
    normalization="RMSNorm",
    activation="swiglu",
    position_embedding_type="rope",
    add_bias_linear=False,
)
RUN = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 8 --swiglu "
    "--attention-dropout 0 --micro-batch-size 1 --global-batch-size 2 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 60 --lr 1e-2 --eval-iters 1 --eval-interval 2 "
    "--torch-compile"
).split()
TRACED = "aot_eager_decomp_partition"  # all but the generation of code


def graphs(monkeypatch, steps: int, *flags: str) -> int:
    """How many graphs a run of `steps` steps compiles."""
    monkeypatch.setattr(compile, "BACKEND", TRACED)
    counters.clear()
    assert main([*RUN, *flags, "--train-iters", str(steps)]) == 0
    return counters["stats"]["unique_graphs"]


def test_layers_of_a_kind_share_graphs_and_later_steps_compile_nothing(monkeypatch, capsys):
    """The first, a middle and the last layer, in training and in evaluation; all layers have
    dropout of their own.
    """
    dropout = ("--hidden-dropout", "0.1")
    # three layers in two modes, all of them in the first two steps
    assert graphs(monkeypatch, 4, *dropout) == 6


@pytest.mark.full
def test_recomputation_compiles_a_third_mode(monkeypatch, capsys):
    recompute = ("--recompute-granularity", "full")
    assert graphs(monkeypatch, 2, "--hidden-dropout", "0.1", *recompute) == compile.GRAPHS


@pytest.mark.full
def test_frozen_layers_are_a_kind(monkeypatch, capsys):
    """The first layer, two in the middle and the last."""
    flags = "--recompute-granularity full --freeze embedding,layers.0-1"
    assert graphs(monkeypatch, 2, *flags.split()) == 4 * compile.MODES


def micro_batch(model: GPTModel) -> MicroBatch:
    ids, positions = torch.zeros(B, S, dtype=torch.int64), torch.arange(S).expand(B, S)
    batch = (ids, ids, torch.ones(B, S), positions, torch.tensor([3, 8]))
    return model.micro_batch(*batch, training=True)


def kept_bytes(config: ModelConfig, dtype: torch.dtype, compiled: bool) -> int:
    """What a middle layer keeps for its backward pass, but for its input, tables and weights."""
    model = GPTModel(config, vocab_size=16, padded_vocab=16, dtype=dtype, seed=3)
    layer: TransformerLayer = model.layers["1"].to_empty(device="cpu").to(dtype)
    if compiled:
        compile.compile_layers(model, torch.device("cpu"))
    micro = micro_batch(model)
    x = torch.zeros(S, B, H, dtype=dtype, requires_grad=True)
    others = {each.untyped_storage().data_ptr() for each in (x, *layer.parameters())}
    others |= {each.untyped_storage().data_ptr() for each in micro.rotary or ()}
    kept: dict[int, int] = {}

    def keep(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in others:
            kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        output = layer(x, micro)
    assert output.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_a_compiled_layer_keeps_what_the_plan_counts(monkeypatch, config, dtype):
    monkeypatch.setattr(compile, "BACKEND", TRACED)
    eager, compiled = (kept_bytes(config, dtype, compiled) for compiled in (False, True))
    assert compiled == eager > 0


class Plain(nn.Module):
    """An MLP of torch's own modules."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(H, 24), nn.Linear(24, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)).square())


def test_an_ordinary_module_in_a_layer_is_compiled_and_trained(monkeypatch):
    """Its gradients are in `.grad`, those of the modules around it in main_grad."""
    monkeypatch.setattr(compile, "BACKEND", TRACED)
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = GPTModel(LLAMA, vocab_size=16, padded_vocab=16, dtype=torch.float32, seed=3)
        layer: TransformerLayer = model.layers["1"].to_empty(device="cpu")
        layer.mlp = Plain()
        for parameter in layer.parameters():
            parameter.data.normal_(std=0.1)
            parameter.main_grad = torch.zeros_like(parameter)
        if compiled:
            compile.compile_layers(model, torch.device("cpu"))
        x = torch.randn(S, B, H, requires_grad=True)
        layer(x, micro_batch(model)).square().sum().backward()
        owned = {id(parameter) for parameter in layer.mlp.parameters()}
        gradients = [
            parameter.grad if id(parameter) in owned else parameter.main_grad
            for parameter in layer.parameters()
        ]
        found.append([x.grad, *gradients])
    for eager, compiled in zip(*found, strict=True):
        assert eager.norm() > 0
        # 100 roundings of 2^-24 in a row
        assert (eager - compiled).norm() <= 6e-7 * eager.norm()
