r"""Our import against DeepSpeed itself: ZeRO folders that it writes, and the fp32 weights that its
own tools take out of them.

In an environment with DeepSpeed (DS_ACCELERATOR=cpu on a machine without a GPU) and transformers,
then in ours:

    PEER/python -m torch.distributed.run --nproc-per-node 2 \
        campaigns/peer_checkpoints/deepspeed_checkpoint.py write OUT --kind llama --stage 3
    python campaigns/peer_checkpoints/deepspeed_checkpoint.py compare OUT

`write` trains a tiny model in bf16 for three steps and saves it; next to it, in OUT/whole, lie the
fp32 weights as zero_to_fp32 puts them together and as DeepSpeed's running optimizer holds them.
`compare` imports the folder and ends with 1 unless every tensor is the same bit for bit. Kinds:
llama (grouped queries, untied) and gpt2 (tied) of transformers, each process a data-parallel rank;
megatron: the names and slices of a Megatron-DeepSpeed GPT with two tensor-parallel ranks, gated MLP
and grouped queries (stages 1 and 2); pipeline: DeepSpeed's own pipeline module in two stages with
tied ends, as Megatron-DeepSpeed lists its layers (stage 1).
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

VOCAB, PADDED, LAYERS, HIDDEN, HEADS, GROUPS, FFN, LENGTH = 67, 72, 3, 32, 4, 2, 40, 24


# of those that Megatron-DeepSpeed keeps in its checkpoints
ARGUMENTS = f"""
    num_layers={LAYERS} hidden_size={HIDDEN} ffn_hidden_size={FFN} num_attention_heads={HEADS}
    num_key_value_heads={GROUPS} kv_channels={HIDDEN // HEADS} max_position_embeddings={LENGTH}
    use_rotary_position_embeddings=True rope_theta=10000 rotary_percent=1.0
    add_position_embedding=False normalization='rmsnorm' layernorm_epsilon=1e-5 swiglu=True
    add_bias_linear=False hidden_dropout=0.0 attention_dropout=0.0 init_method_std=0.02
    num_experts=[1] make_vocab_size_divisible_by=8
"""


def normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def transformers_model(kind: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if kind == "gpt2":
        sizes = {"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": HIDDEN, "n_head": HEADS}
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return GPT2LMHeadModel(GPT2Config(n_layer=LAYERS, **sizes, **drops))
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": FFN}
    sizes |= {"num_hidden_layers": LAYERS, "max_position_embeddings": LENGTH}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS}
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **sizes))


class Slices(nn.Module):
    """Parameters under names with dots, as one of `tp` tensor-parallel ranks of Megatron-DeepSpeed
    holds them. They learn to be zero.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], tp: int = 1, seed: int = 0) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for step in path:
                if step not in dict(module.named_children()):
                    module.add_module(step, nn.Module())
                module = getattr(module, step)
            # vectors are the same on both
            rank = 0 if len(shape) == 1 else dist.get_rank() % tp
            own = seed + sum(map(ord, name)) + 1000 * rank
            module.register_parameter(leaf, nn.Parameter(normal(shape, own)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.is_floating_point() else x.float()
        return x + sum(p.float().square().mean() for p in self.parameters()).to(x.dtype)


def layer_shapes(tp: int) -> dict[str, tuple[int, ...]]:
    """Of a layer of Megatron-DeepSpeed's GPT with a gated MLP, grouped queries and no biases."""
    qkv = (HEADS + 2 * GROUPS) * (HIDDEN // HEADS) // tp
    return {
        "input_layernorm.weight": (HIDDEN,),
        "self_attention.query_key_value.weight": (qkv, HIDDEN),
        "self_attention.dense.weight": (HIDDEN, HIDDEN // tp),
        "post_attention_layernorm.weight": (HIDDEN,),
        "mlp.dense_h_to_4h.weight": (2 * FFN // tp, HIDDEN),
        "mlp.dense_4h_to_h.weight": (HIDDEN, FFN // tp),
    }


def megatron_model(tp: int) -> nn.Module:
    word, stem = (PADDED // tp, HIDDEN), "language_model.encoder."
    shapes = {"language_model.embedding.word_embeddings.weight": word}
    for i in range(LAYERS):
        shapes |= {f"{stem}layers.{i}.{name}": shape for name, shape in layer_shapes(tp).items()}
    shapes[f"{stem}final_layernorm.weight"] = (HIDDEN,)
    shapes["language_model.output_layer.weight"] = word
    return Slices(shapes, tp)


def pipeline_model() -> nn.Module:
    """The list of Megatron-DeepSpeed's pipeline module, in two stages, its ends tied."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    word = {"word_embeddings.weight": (PADDED, HIDDEN)}

    class Tied(Slices):
        word_embeddings_weight = property(lambda self: self.word_embeddings.weight)

    def tied(**more: object) -> TiedLayerSpec:
        return TiedLayerSpec("embed", Tied, word, tied_weight_attr="word_embeddings_weight", **more)

    layers = [LayerSpec(Slices, layer_shapes(1), seed=100 * i) for i in range(LAYERS)]
    plan = [
        lambda x: x,
        tied(),
        *layers,
        LayerSpec(Slices, {"weight": (HIDDEN,)}),
        tied(forward_fn=lambda module, x: module(x)),
        lambda x: x.float(),
    ]
    return PipelineModule(
        plan, num_stages=2, partition_method="uniform", loss_fn=lambda out, _: out.mean()
    )


def ranks_of(tp: int) -> SimpleNamespace:
    """What DeepSpeed asks its user about tensor parallelism: ranks are tp fastest."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model, data = (
        [dist.new_group(ranks) for ranks in every]
        for every in (
            [list(range(first, first + tp)) for first in range(0, world, tp)],
            [list(range(t, world, tp)) for t in range(tp)],
        )
    )
    answers = {
        "pipeline_model_parallel_rank": 0,
        "pipeline_model_parallel_world_size": 1,
        "data_parallel_rank": rank // tp,
        "data_parallel_world_size": world // tp,
        "data_parallel_group": data[rank % tp],
    }
    for name in ("model", "tensor_model", "slice"):
        answers |= {f"{name}_parallel_rank": rank % tp, f"{name}_parallel_world_size": tp}
        answers[f"{name}_parallel_group"] = model[rank // tp]
    given = {f"get_{name}": lambda value=value: value for name, value in answers.items()}
    return SimpleNamespace(**given)


def write(out: Path, flags: argparse.Namespace) -> None:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    deepspeed.init_distributed("gloo")
    torch.manual_seed(7)
    tp, piped = 2 if flags.kind == "megatron" else 1, flags.kind == "pipeline"
    if piped:
        model = pipeline_model()
    else:
        model = megatron_model(tp) if tp > 1 else transformers_model(flags.kind)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(0.1 * normal(p.shape, len(name)))
    zero = {"stage": flags.stage, "stage3_param_persistence_threshold": 0}
    zero |= {"sub_group_size": flags.sub_group, "round_robin_gradients": flags.round_robin}
    settings = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}
    settings |= {"steps_per_print": 10**9, "zero_optimization": zero}
    settings["bf16"] = {"enabled": flags.precision == "bf16"}
    if flags.fp32_accumulation:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer, mpu = torch.optim.AdamW(groups, lr=1e-3), ranks_of(tp) if tp > 1 else None
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=mpu)

    # 1. Three steps, and DeepSpeed's own checkpoint.
    draw = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=draw)
    for _ in range(3):
        if piped:
            engine.train_batch(iter([(torch.zeros(2, 8), torch.zeros(2))]))
            continue
        given = {"input_ids": tokens, "labels": tokens}
        engine.backward(engine(tokens).mean() if tp > 1 else engine(**given).loss)
        engine.step()
    words = (word.split("=") for word in ARGUMENTS.split())
    arguments = {name: ast.literal_eval(value) for name, value in words}
    arguments |= {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": 1 + piped}
    arguments["untie_embeddings_and_output_weights"] = not piped
    state = {"args": argparse.Namespace(**arguments), "iteration": 3}
    engine.save_checkpoint(str(out), client_state=state if tp > 1 or piped else {})

    # 2. The fp32 weights. With round_robin_gradients safe_get_full_fp32_param reads other
    # parameters' elements; in fp32 the weights are the masters.
    plain = flags.precision == "fp32" and flags.stage < 3
    masters = {
        name: (p.detach() if plain else safe_get_full_fp32_param(p)).clone()
        for name, p in engine.module.named_parameters()
    }
    whole = out / "whole"
    whole.mkdir(exist_ok=True)
    if tp > 1 or piped:
        # replicas write the same
        rank = dist.get_rank() % 2 if tp > 1 else engine.stage_id
        torch.save(masters, whole / f"running_{rank}.pt")
    elif dist.get_rank() == 0:
        model.config.save_pretrained(out)
        save_whole(whole / "running", model, masters)
        try:
            state = get_fp32_state_dict_from_zero_checkpoint(str(out))
            save_whole(whole / "zero_to_fp32", model, state)
        except ValueError as error:  # it does not read what its own BF16_Optimizer writes
            print(f"zero_to_fp32: {error}")
    dist.barrier()
    dist.destroy_process_group()


def save_whole(folder: Path, model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """A folder of Hugging Face's format."""
    from safetensors.torch import save_file

    folder.mkdir()
    weights = {name: value.clone() for name, value in state.items() if value.is_floating_point()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)


def as_megatron(whole: Path) -> Path:
    """The running optimizer's weights of two tensor-parallel ranks, or of two stages, as a folder
    that --from-megatron reads.
    """
    words = {
        "query_key_value": "linear_qkv",
        "attention.dense": "attention.linear_proj",
        "post_attention_layernorm": "pre_mlp_layernorm",
        "dense_h_to_4h": "linear_fc1",
        "dense_4h_to_h": "linear_fc2",
        "language_model.encoder.": "decoder.",
        "language_model.": "",
        f"{LAYERS + 2}.weight": "decoder.final_layernorm.weight",
    }
    for rank in (0, 1):
        held, state = torch.load(whole / f"running_{rank}.pt"), {}
        piped = any(name.startswith("tied") for name in held)
        first = min(int(name[0]) for name in held if "input_layernorm" in name) if piped else 0
        for name, value in held.items():
            if piped and name[2:].startswith(("input", "self", "post", "mlp")):
                name = f"decoder.layers.{int(name[0]) - first}{name[1:]}"  # from 0 on in each stage
            name = name.replace(
                "tied_modules.embed.word_embeddings",
                "output_layer" if rank else "embedding.word_embeddings",
            )
            for theirs, core in words.items():
                name = name.replace(theirs, core)
            state[name] = value
        folder = whole / "megatron" / (f"mp_rank_00_{rank:03d}" if piped else f"mp_rank_{rank:02d}")
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"model": state}, folder / "model_optim_rng.pt")
    return whole / "megatron"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == torch.float32 and torch.equal(a.view(torch.int32), b.view(torch.int32))


def compare(out: Path) -> int:
    """Prints how many tensors are equal to those of each of DeepSpeed's ways to put them
    together.
    """
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "tools"), str(root / "tests")]
    import convert_checkpoint
    from zero_structure import differences

    from megatron.checkpoint.reader import Checkpoint, open_checkpoint

    def take(*words: object) -> Checkpoint:
        if code := convert_checkpoint.main([str(word) for word in words]):
            sys.exit(code)
        return open_checkpoint(str(words[-1]))

    whole, different = out / "whole", 0
    megatron = (whole / "running_0.pt").exists()
    order = ["--qkv-order", "grouped"] if megatron else []
    ours = take("--from-deepspeed", out, *order, "--save", whole / "ours")
    if megatron:
        config = "--config", whole / "ours" / "model.json"
        ways = [("running", "--from-megatron", as_megatron(whole), *config)]
    else:
        folders = sorted(path.parent for path in whole.glob("*/model.safetensors"))
        ways = [(folder.name, "--from-huggingface", folder) for folder in folders]
    for name, *words in ways:
        theirs = take(*words, "--save", whole / f"as_{name}")
        equal = [
            key
            for key in ours.names
            if key in theirs.names and same_bits(ours.read_tensor(key), theirs.read_tensor(key))
        ]
        different += len(ours.names) - len(equal) + len(theirs.names) - len(ours.names)
        print(f"{name}: {len(equal)} of {len(theirs.names)} tensors have the same bits")
    strange = differences(out)
    built = "the files are built as those of tests/unit/checkpoint/zero_cases.py"
    print("\n".join(strange) or built)
    return int(different > 0 or not ways or bool(strange))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ["llama", "gpt2", "megatron", "pipeline"]
    parser.add_argument("what", choices=["write", "compare"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=kinds, default="llama")
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=1)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    # with stage 1 this is DeepSpeed's BF16_Optimizer
    parser.add_argument("--fp32-accumulation", action="store_true")
    parser.add_argument("--round-robin", action="store_true", help="round_robin_gradients")
    parser.add_argument("--sub-group", type=int, default=10**9, help="stage 3's sub_group_size")
    flags = parser.parse_args()
    if flags.what == "compare":
        return compare(flags.out)
    write(flags.out, flags)
    return 0


if __name__ == "__main__":
    sys.exit(main())
