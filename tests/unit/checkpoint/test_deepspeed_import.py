"""ZeRO folders of DeepSpeed become ours with the bits of its fp32 masters; what does not belong
together is one error; poison does nothing.

The folders are built by zero_cases.py; campaigns/peer_checkpoints/ makes real ones and
proves the same of them.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_cases import loads, same_bits
from huggingface_models import MODELS
from megatron.tools._convert.megatron_deepspeed import is_megatron
from megatron_names import LAYERS, PADDED, VOCAB, megatron_names, tp_part
from test_convert_ranks import convert
from test_huggingface import build, exported
from zero_cases import deepspeed_classes, in_groups, write_rank

from megatron.checkpoint.reader import open_checkpoint


def write_huggingface(
    root: Path, case: str, kind: str, ranks: int, **extra: object
) -> dict[str, torch.Tensor]:
    """A run of a Hugging Face model; returns our logical tensors in fp32."""
    config = MODELS[case]
    held = {name: value.float() for name, value in build(config)[1].items()}
    described, theirs = exported(config, held)
    head = {
        "lm_head.weight": next(name for name in theirs if "embed_tokens" in name or "wte" in name)
    }
    buffers = {name: theirs.pop(name) for name in list(theirs) if name.endswith("correction_bias")}
    write_rank(
        root / "global_step3",
        in_groups(theirs),
        kind,
        ranks,
        shared={} if "lm_head.weight" in theirs else head,
        buffers=buffers,
        **extra,
    )
    (root / "config.json").write_text(json.dumps(described))
    return held


@pytest.mark.parametrize(
    "case, kind, ranks",
    [
        ("llama tied, gqa, eps", "1", 2),
        ("gpt2", "2", 3),
        ("qwen3", "3", 5),
        ("gpt2 untied, tanh", "bf16", 4),
        ("dots1", "3", 2),
        ("glm4_moe", "1", 2),
    ],
)
def test_models_of_hugging_face(tmp_path, case, kind, ranks):
    held = write_huggingface(tmp_path / "theirs", case, kind, ranks)
    code, shown = convert("--from-deepspeed", tmp_path / "theirs", "--save", tmp_path / "run")
    assert code == 0 and "note: weights only" in shown, shown
    loads(tmp_path / "run" / "iter_0000000", held)


def test_two_ranks_take_equal_shares_of_the_pieces(tmp_path, gloo_world):
    held = write_huggingface(tmp_path / "theirs", "llama tied, gqa, eps", "3", 3)
    words = ("--from-deepspeed", tmp_path / "theirs" / "global_step3", "--save", tmp_path / "run")
    assert [code for code, _ in gloo_world(2).run(convert, *words)] == [0, 0]
    loads(tmp_path / "run" / "iter_0000000", held)
    with open_checkpoint(tmp_path / "run") as checkpoint:
        assert len(checkpoint.shards) == 2


# ---- Megatron-DeepSpeed --------------------------------------------------------------------------


def write_megatron(
    root: Path, case: str, *, tp: int, pp: int, stacked: bool, pipe: bool, kind: str = "1"
) -> dict[str, torch.Tensor]:
    """Under the names of its GPT, or of its pipeline module; two data-parallel ranks. Returns our
    logical tensors.
    """
    arguments, theirs, held, _ = megatron_names(case)
    gated, d = arguments.swiglu, arguments.kv_channels
    inner = {
        "self_attention.linear_qkv": "self_attention.query_key_value",
        "self_attention.linear_proj": "self_attention.dense",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
        "self_attention.linear_qkv.layer_norm": "input_layernorm",
    }

    def local(name: str, value: torch.Tensor, rank: int) -> torch.Tensor:
        own = tp_part(name, value, rank, tp, gated)
        if not stacked or not ("linear_qkv.weight" in name or "linear_qkv.bias" in name):
            return own
        parts = own.view(-1, 3, d, *own.shape[1:]).unbind(1)
        return torch.cat([part.flatten(0, 1) for part in parts])

    def renamed(name: str, layer: int) -> str:
        stem, _, end = (
            name.replace("layer_norm_", "layer_norm.")
            .removeprefix("decoder.layers.")
            .rpartition(".")
        )
        stem = inner.get(stem, stem)
        if name.startswith("decoder.layers."):
            of_layer = f"{layer + 2}" if pipe else f"language_model.encoder.layers.{layer}"
            return f"{of_layer}.{stem}.{end}"
        if not pipe:
            return f"language_model.{stem.replace('decoder.', 'encoder.')}.{end}"
        tied = "tied_modules.embed" if "output_layer.weight" not in theirs else "1"
        last = {"decoder.final_layernorm": f"{LAYERS + 3}", "output_layer": f"{LAYERS + 4}.lm_head"}
        of_stage = last.get(stem, f"{tied}.{stem.removeprefix('embedding.')}")
        return f"{of_stage}.{end}"

    state = vars(arguments) | {
        "num_key_value_heads": arguments.num_query_groups,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "normalization": arguments.normalization.lower(),
        "num_experts": [1],
        "add_position_embedding": True,
        "use_rotary_position_embeddings": arguments.position_embedding_type == "rope",
        "rope_theta": 10000,
    }
    ours = "exit_signal position_embedding_type rotary_base group_query_attention num_query_groups"
    for name in ours.split():
        state.pop(name, None)
    stages = [range(LAYERS)] if pp == 1 else [range(2), range(2, LAYERS)]
    for stage, layers in enumerate(stages):
        for rank in range(tp):
            own = {}
            for name, value in theirs.items():
                if name.startswith("decoder.layers."):
                    own |= {renamed(name, i): local(name, value[i], rank).float() for i in layers}
                elif stage == (0 if name.startswith("embedding") else pp - 1) or (
                    pipe and "tied" in renamed(name, 0) and stage == pp - 1
                ):
                    own[renamed(name, 0)] = local(name, value, rank).float()
            write_rank(
                root / "global_step3",
                in_groups(own),
                kind,
                2,
                model_rank=stage * tp + rank,
                args=argparse.Namespace(**state),
                **({"module": None} if pipe else {}),
            )
    return {name: value.float() for name, value in held.items()}


@pytest.mark.parametrize(
    "case, tp, pp, stacked, pipe",
    [
        ("llama tied, gqa, eps", 2, 1, False, False),
        ("gpt2", 2, 2, True, True),
        ("llama", 2, 2, False, True),
    ],
)
def test_megatron_deepspeed(tmp_path, case, tp, pp, stacked, pipe):
    held = write_megatron(tmp_path / "theirs", case, tp=tp, pp=pp, stacked=stacked, pipe=pipe)
    words = ("--from-deepspeed", tmp_path / "theirs", "--save", tmp_path / "run")
    words += ("--vocab-size", VOCAB, "--qkv-order")
    code, shown = convert(*words, "stacked" if stacked else "grouped")
    assert code == 0, shown
    loads(tmp_path / "run" / "iter_0000000", held)
    shutil.rmtree(tmp_path / "run")
    # the negative control: it is the order that decides
    code, shown = convert(*words, "grouped" if stacked else "stacked")
    if "gqa" in case:
        assert "cannot hold grouped queries" in shown
    else:
        name = "layers.0.attention.q.weight"
        with open_checkpoint(tmp_path / "run") as checkpoint:
            assert code == 0 and not same_bits(checkpoint.read_tensor(name), held[name])


def test_what_the_folder_of_megatron_deepspeed_does_not_say(tmp_path):
    write_megatron(tmp_path / "theirs", "llama", tp=2, pp=1, stacked=False, pipe=False)
    words = ("--from-deepspeed", tmp_path / "theirs", "--save", tmp_path / "run")
    assert "give --qkv-order grouped (its code before 4 December 2024" in convert(*words)[1]
    words += ("--qkv-order", "grouped")
    assert f"{PADDED} rows; --vocab-size is 100" in convert(*words, "--vocab-size", 100)[1]
    for path in (tmp_path / "theirs" / "global_step3").glob("*mp_rank_01*"):
        path.unlink()
    assert (
        "has partitions of 1 model-parallel ranks, the run had 2 (tp 2, pp 1)" in convert(*words)[1]
    )
    assert not (tmp_path / "run").exists()


# ---- faults --------------------------------------------------------------------------------------


def test_gpt_neox_of_hugging_face_is_not_megatron_deepspeed():
    assert not is_megatron({"gpt_neox.layers.0.attention.query_key_value.weight"})
    assert is_megatron({"2.self_attention.query_key_value.weight"})


def change(path: Path, **values: object) -> None:
    """Entries of an optimizer file's state."""
    with deepspeed_classes():
        content = torch.load(path, weights_only=False)
        content["optimizer_state_dict"] |= values
        torch.save(content, path)


@pytest.mark.parametrize("kind", ["2", "3"])
def test_partitions_that_do_not_belong_together(tmp_path, kind):
    root = tmp_path / "theirs"
    write_huggingface(root, "gpt2", kind, 2)
    words, folder = ("--from-deepspeed", root, "--save", tmp_path / "run"), root / "global_step3"
    first, second = (
        folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)
    )

    def refused(text: str) -> None:
        code, shown = convert(*words)
        assert code == 2 and text in shown and shown.count("error:") == 1, shown
        assert not (tmp_path / "run").exists()

    kept = second.read_bytes()
    second.unlink()
    refused(
        f"{first}: is one of 2 partitions, and 1 are missing (of data-parallel ranks 1): "
        "bring the files of one save"
    )
    second.write_bytes(kept[: len(kept) // 2])
    refused(f"{second}: is not a file of torch.save")
    second.write_bytes(kept)
    write_huggingface(tmp_path / "other", "gpt2", kind, 3)
    shutil.copy(tmp_path / "other" / "global_step3" / second.name, second)
    refused(
        f"{second}: stage {kind} of 3 partitions, but {first.name} is stage {kind} of 2 partitions"
    )
    write_huggingface(tmp_path / "smaller", "llama", kind, 2)
    shutil.copy(tmp_path / "smaller" / "global_step3" / second.name, second)
    refused("not of the same save")
    second.write_bytes(kept)
    key = "fp32_flat_groups" if kind == "3" else "single_partition_of_fp32_groups"
    change(second, **{key: [torch.zeros(3, dtype=torch.bfloat16)] * 2})
    refused(f"{second}: {key} are no fp32 vectors")


def test_models_that_do_not_fit(tmp_path):
    root = tmp_path / "theirs"
    write_huggingface(
        root, "qwen3", "1", 2, frozen_param_shapes={"model.norm.weight": torch.Size([32])}
    )
    words = ("--from-deepspeed", root, "--save", tmp_path / "run")
    assert "model.norm.weight was frozen and has no master weight" in convert(*words)[1]
    write_huggingface(root, "qwen3", "1", 2)
    described = json.loads((root / "config.json").read_text())
    for changes, text in (
        ({"num_hidden_layers": 4}, "tensors missing: model.layers.3"),
        ({"intermediate_size": 96}, "the model's flags need [96, 32]"),
    ):
        (root / "config.json").write_text(json.dumps(described | changes))
        assert text in convert(*words)[1]
    (root / "config.json").unlink()
    assert "no config.json there" in convert(*words)[1]
    (root / "latest").write_text("global_step4")
    assert "no *_optim_states.pt there" in convert(*words)[1]
    assert not (tmp_path / "run").exists()
