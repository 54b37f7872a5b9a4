r"""Our import against DeepSpeed itself: ZeRO folders that it writes, and the fp32 weights that its
own tools take out of them.

In an environment with DeepSpeed (DS_ACCELERATOR=cpu on a machine without a GPU) and transformers,
then in ours:

    PEER/python -m torch.distributed.run --nproc-per-node 2 \
        tests/parity/deepspeed_checkpoint.py write OUT --kind llama --stage 3
    python tests/parity/deepspeed_checkpoint.py compare OUT

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
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

VOCAB, PADDED, LAYERS, HIDDEN, HEADS, GROUPS, FFN, LENGTH = 67, 72, 3, 32, 4, 2, 40, 24


def transformers_model(kind: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB,
                n_positions=LENGTH,
                n_embd=HIDDEN,
                n_layer=LAYERS,
                n_head=HEADS,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=FFN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=GROUPS,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=False,
        )
    )


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
            own = (
                seed
                + sum(map(ord, name))
                + (0 if len(shape) == 1 else 1000 * (dist.get_rank() % tp))
            )
            module.register_parameter(
                leaf, nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(own)))
            )

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
    layers = {
        f"{stem}layers.{i}.{name}": shape
        for i in range(LAYERS)
        for name, shape in layer_shapes(tp).items()
    }
    return Slices(
        {
            "language_model.embedding.word_embeddings.weight": word,
            **layers,
            f"{stem}final_layernorm.weight": (HIDDEN,),
            "language_model.output_layer.weight": word,
        },
        tp,
    )


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
    model = (
        megatron_model(tp)
        if tp > 1
        else pipeline_model()
        if piped
        else transformers_model(flags.kind)
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": flags.precision == "bf16"},
        "zero_optimization": {
            "stage": flags.stage,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": flags.sub_group,
            "round_robin_gradients": flags.round_robin,
        },
        **({"data_types": {"grad_accum_dtype": "fp32"}} if flags.fp32_accumulation else {}),
    }
    decayed, rest = (
        [p for p in model.parameters() if p.dim() > 1],
        [p for p in model.parameters() if p.dim() == 1],
    )
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-3
    )
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings, mpu=ranks_of(tp) if tp > 1 else None
    )
    tokens = torch.randint(
        VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank())
    )
    for _ in range(3):
        if piped:
            engine.train_batch(iter([(torch.zeros(2, 8), torch.zeros(2))]))
            continue
        engine.backward(
            engine(tokens).mean() if tp > 1 else engine(input_ids=tokens, labels=tokens).loss
        )
        engine.step()
    arguments = argparse.Namespace(  # of those that Megatron-DeepSpeed keeps
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        kv_channels=HIDDEN // HEADS,
        max_position_embeddings=LENGTH,
        use_rotary_position_embeddings=True,
        rope_theta=10000,
        rotary_percent=1.0,
        add_position_embedding=False,
        normalization="rmsnorm",
        layernorm_epsilon=1e-5,
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=not piped,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.02,
        num_experts=[1],
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=1 + piped,
        make_vocab_size_divisible_by=8,
    )
    engine.save_checkpoint(
        str(out), client_state={"args": arguments, "iteration": 3} if tp > 1 or piped else {}
    )
    # with round_robin_gradients safe_get_full_fp32_param reads other parameters' elements; in fp32
    # the weights are the masters
    plain = flags.precision == "fp32" and flags.stage < 3
    masters = {
        name: (p.detach() if plain else safe_get_full_fp32_param(p)).clone()
        for name, p in engine.module.named_parameters()
    }
    whole = out / "whole"
    whole.mkdir(exist_ok=True)
    if tp > 1 or piped:
        # replicas write the same
        torch.save(
            masters, whole / f"running_{dist.get_rank() % 2 if tp > 1 else engine.stage_id}.pt"
        )
    elif dist.get_rank() == 0:
        from safetensors.torch import save_file

        model.config.save_pretrained(out)
        for name in ("running", "zero_to_fp32"):
            folder = whole / name
            folder.mkdir()
            try:
                state = (
                    masters
                    if name == "running"
                    else get_fp32_state_dict_from_zero_checkpoint(str(out))
                )
            except ValueError as error:  # it does not read what its own BF16_Optimizer writes
                print(f"zero_to_fp32: {error}")
                continue
            state = {
                key: value.clone() for key, value in state.items() if value.is_floating_point()
            }
            save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
            model.config.save_pretrained(folder)
    dist.barrier()
    dist.destroy_process_group()


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


def compare(out: Path) -> int:
    """Prints how many tensors are equal to those of each of DeepSpeed's ways to put them
    together.
    """
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "tools")]
    import convert_checkpoint

    from megatron.checkpoint.reader import Checkpoint, open_checkpoint

    sys.path.insert(0, str(root / "tests" / "unit" / "checkpoint"))
    import zero_cases

    def take(*words: object) -> Checkpoint:
        if code := convert_checkpoint.main([str(word) for word in words]):
            sys.exit(code)
        return open_checkpoint(str(words[-1]))

    whole, different = out / "whole", 0
    megatron = (whole / "running_0.pt").exists()
    ours = take(
        "--from-deepspeed",
        out,
        *(["--qkv-order", "grouped"] if megatron else []),
        "--save",
        whole / "ours",
    )
    ways = (
        [
            (
                "running",
                "--from-megatron",
                as_megatron(whole),
                "--config",
                whole / "ours" / "model.json",
            )
        ]
        if megatron
        else [
            (path.parent.name, "--from-huggingface", path.parent)
            for path in sorted(whole.glob("*/model.safetensors"))
        ]
    )
    for name, *words in ways:
        theirs = take(*words, "--save", whole / f"as_{name}")
        equal = [
            key
            for key in ours.names
            if key in theirs.names
            and ours[key].dtype == torch.float32
            and torch.equal(ours[key].view(torch.int32), theirs[key].view(torch.int32))
        ]
        different += len(ours.names) - len(equal) + len(theirs.names) - len(ours.names)
        print(f"{name}: {len(equal)} of {len(theirs.names)} tensors have the same bits")
    strange = zero_cases.differences(out)
    print(
        "\n".join(strange) or "the files are built as those of tests/unit/checkpoint/zero_cases.py"
    )
    return int(different > 0 or not ways or bool(strange))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["write", "compare"])
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--kind", choices=["llama", "gpt2", "megatron", "pipeline"], default="llama"
    )
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=1)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument(
        "--fp32-accumulation",
        action="store_true",
        help="with stage 1 this is DeepSpeed's BF16_Optimizer",
    )
    parser.add_argument(
        "--round-robin", action="store_true", help="DeepSpeed's round_robin_gradients"
    )
    parser.add_argument("--sub-group", type=int, default=10**9, help="stage 3's sub_group_size")
    flags = parser.parse_args()
    if flags.what == "compare":
        return compare(flags.out)
    write(flags.out, flags)
    return 0


if __name__ == "__main__":
    sys.exit(main())
