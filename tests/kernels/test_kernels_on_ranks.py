"""A model by the kernels and by PyTorch on two tensor-parallel ranks with sequence parallelism:
losses and gradients, whole, recomputed, in two parts.
"""

import dataclasses

import interpreter
import pytest
import torch
import torch.distributed as dist
from selection import each_axis
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

from megatron.config.groups import ModelConfig
from megatron.data.loader import Batch
from megatron.distributed.groups import Layout, build_groups
from megatron.model.attention.context_parallel import ContextParallel
from megatron.model.gpt import GPTModel
from megatron.model.init import fill_initial
from megatron.model.spec import NO_TP, TensorParallel
from megatron.parallel.blocks import build_blocks
from megatron.parallel.layer_runner import LayerRunner
from megatron.training.passes import share_positions

pytestmark = pytest.mark.table(traits=each_axis)

S, B, VOCAB = 8, 1, 30
TYPES = {  # of context parallelism, and its groups
    "allgather": {},
    "a2a": {"cp_heads": 2},
    "p2p": {"cp_ring": 2},
}
GPT = ModelConfig(
    num_layers=1,
    hidden_size=32,
    ffn_hidden_size=24,
    num_attention_heads=4,
    kv_channels=8,
    num_query_groups=4,
    max_position_embeddings=S,
    attention_dropout=0.1,
    hidden_dropout=0.1,
)
RECOMPUTE = {
    "recompute": FULL_RECOMPUTE,
    "selective": recomputing("layernorm", "qkv", "core_attn", "mlp"),
}
CONFIGS = {
    "gpt": GPT,
    "llama": dataclasses.replace(
        GPT,
        num_query_groups=2,
        activation="swiglu",
        normalization="RMSNorm",
        add_bias_linear=False,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=True,
        fused_linear_cross_entropy=True,
    ),
}
TRITON = {
    f"{name}_backend": "triton"
    for name in ("attention", "norm", "rotary", "activation", "dropout", "cross_entropy", "init")
}


def passes(config: ModelConfig, how: str) -> dict[str, torch.Tensor]:
    """The loss and every main_grad of one micro-batch on this rank."""
    tp, cp = NO_TP, ContextParallel()
    if how in TYPES:
        groups = build_groups(Layout(cp=2), dist.get_rank(), dist.new_group, **TYPES[how])
        cp = ContextParallel.of(groups, how)
    else:
        groups = build_groups(Layout(tp=2), dist.get_rank(), dist.new_group)
        tp = TensorParallel(groups.tp, sequence=True)
    model = GPTModel(
        config, vocab_size=VOCAB, padded_vocab=32, dtype=torch.float32, seed=5, tp=tp, cp=cp
    )
    for block in build_blocks(model, torch.device("cpu")):
        for entry in block.entries:
            for box in entry.boxes:
                fill_initial(box, entry.view(block.weight), 5)
        block.open()
    ids = torch.randint(0, VOCAB, (B, S + 1), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 5 + [5] * 3], dtype=torch.int32)
    ones, places = torch.ones(B, S), torch.arange(S).expand(B, S)
    batch = Batch(ids[:, :-1], ids[:, 1:], ones, places, documents, torch.arange(B))
    if cp.size > 1:
        batch = share_positions(batch, cp, None)
    micro = model.micro_batch(**vars(batch), training=True)
    run = LayerRunner()
    model.choose_recompute(RECOMPUTE.get(how, NO_RECOMPUTE))
    sums, saved = forward(model, micro, run)
    dy = loss_gradient(sums, 1.0)
    if how == "in two parts":
        _, left = backward_input(model, saved, dy, run)
        backward_weight(left, run)
    else:
        backward(model, saved, dy, run)
    return {"loss": sums} | {
        name: parameter.main_grad for name, parameter in model.named_parameters()
    }


def compare(config: ModelConfig, how: str) -> None:
    interpreter.patch()
    torchs, ours = passes(config, how), passes(dataclasses.replace(config, **TRITON), how)
    assert any(not torch.equal(torchs[name], ours[name]) for name in torchs)
    for name, expected in torchs.items():  # keys' biases have no gradient but noise
        scale = expected.norm()
        if "bias" in name:
            scale = max(scale, 1e-3 * torchs["loss"].norm())
        assert (ours[name] - expected).norm() < 5e-6 * scale, name


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="these ranks have CPU tensors, which take the interpreter"
)
@pytest.mark.parametrize("how", ["whole", "in two parts", *RECOMPUTE, *TYPES])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.default("llama-in two parts")
def test_kernels_on_two_ranks(gloo_world, name, how):
    gloo_world(2).run(compare, CONFIGS[name], how)
