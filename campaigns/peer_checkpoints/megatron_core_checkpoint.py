"""Our import against megatron-core itself: checkpoints that it writes (torch_dist, and one file a
rank), and the logits of both.

In an environment with megatron-core and psutil, then in ours:

    SCRIPT=campaigns/peer_checkpoints/megatron_core_checkpoint.py
    RUN="PEER/python -m torch.distributed.run --nproc-per-node"
    $RUN 4 $SCRIPT write OUT --kind llama --tp 2 --pp 2
    $RUN 1 $SCRIPT logits OUT --kind llama
    python $SCRIPT compare OUT

`compare` prints the relative difference of the logits and ends with 1 above 1e-5 (fp32).
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

TOKENS, LENGTH, BOUND = 100, 24, 1e-5


def ids() -> torch.Tensor:
    return torch.randint(TOKENS, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def build(kind: str, tp: int, pp: int):
    """(their model on this rank, its configuration), every weight random. Their code asks for CUDA
    where a CPU would do.
    """
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *device: None
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    tracker = type(
        "Tracker",
        (),
        {"fork": lambda self, *name: nullcontext(), "is_initialized": lambda self: True},
    )
    tensor_parallel.get_cuda_rng_tracker = tracker
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp
    )
    torch.manual_seed(7)
    llama = kind == "llama"
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        ffn_hidden_size=48 if llama else 128,
        num_attention_heads=4,
        num_query_groups=2 if llama else 4,
        kv_channels=8,
        gated_linear_unit=llama,
        activation_func=F.silu if llama else F.gelu,
        add_bias_linear=not llama,
        qk_layernorm=llama,
        normalization="RMSNorm" if llama else "LayerNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        layernorm_epsilon=1e-5,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=llama, normalization=config.normalization),
        vocab_size=128,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        share_embeddings_and_output_weights=not llama,
        position_embedding_type="rope" if llama else "learned_absolute",
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                draw = torch.Generator().manual_seed(len(name))
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
            else:
                parameter.mul_(10)
    return model, config


def write(out: Path, kind: str, tp: int, pp: int) -> None:
    model, config = build(kind, tp, pp)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    llama = kind == "llama"
    arguments = argparse.Namespace(  # of those that Megatron-LM keeps
        num_layers=4,
        hidden_size=32,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=4,
        group_query_attention=llama,
        kv_channels=8,
        num_query_groups=2 if llama else 1,
        max_position_embeddings=LENGTH,
        position_embedding_type="rope" if llama else "learned_absolute",
        rotary_base=10000,
        rotary_percent=1.0,
        normalization=config.normalization,
        norm_epsilon=1e-5,
        swiglu=llama,
        add_bias_linear=not llama,
        add_qkv_bias=False,
        untie_embeddings_and_output_weights=llama,
        qk_layernorm=llama,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.02,
        make_vocab_size_divisible_by=128,
        bias_gelu_fusion=False,
        num_experts=None,
        attention_backend=AttnBackend.auto,
        model_type=ModelType.encoder_or_decoder,
        params_dtype=torch.float32,
    )
    folder = out / "iter_0000003"
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": 3,
        "model": model.sharded_state_dict(),
    }
    dist_checkpointing.save(state, folder, TorchDistSaveShardedStrategy("torch_dist", 1))
    (out / "latest_checkpointed_iteration.txt").write_text("3")
    stage = f"_{parallel_state.get_pipeline_model_parallel_rank():03d}" if pp > 1 else ""
    older = out / "older" / f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}{stage}"
    older.mkdir(parents=True, exist_ok=True)
    torch.save(state | {"model": model.state_dict()}, older / "model_optim_rng.pt")


def logits(out: Path, kind: str) -> None:
    """The output of their model on one process, with the weights that were written."""
    model, _ = build(kind, 1, 1)
    from megatron.core import dist_checkpointing

    model.load_state_dict(
        dist_checkpointing.load({"model": model.sharded_state_dict()}, str(out / "iter_0000003"))[
            "model"
        ]
    )
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        torch.save(model(ids(), torch.arange(LENGTH).expand(2, LENGTH), mask), out / "logits.pt")


def compare(out: Path) -> int:
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "tools")]
    import convert_checkpoint
    import generate

    from megatron.checkpoint.reader import open_checkpoint

    want, differences = torch.load(out / "logits.pt"), []
    for source, save in ((out, out / "ours"), (out / "older", out / "ours_older")):
        if code := convert_checkpoint.main(["--from-megatron", str(source), "--save", str(save)]):
            return code
        with open_checkpoint(save) as checkpoint, torch.no_grad():
            got = generate.load_model(checkpoint, torch.device("cpu")).logits(ids())
        differences.append(((got - want).norm() / want.norm()).item())
        print(f"relative difference of the logits: {differences[-1]:.2e}")
    return int(max(differences) > BOUND)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["write", "logits", "compare"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=["llama", "gpt"], default="llama")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    flags = parser.parse_args()
    if flags.what == "compare":
        return compare(flags.out)
    if flags.what == "write":
        write(flags.out, flags.kind, flags.tp, flags.pp)
    else:
        logits(flags.out, flags.kind)
    return 0


if __name__ == "__main__":
    sys.exit(main())
