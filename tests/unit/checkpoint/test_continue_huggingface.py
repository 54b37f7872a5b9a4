"""A user continues from a Hugging Face model: import, preprocess with its own tokenizer, train,
generate, export, and evaluate in transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from megatron.tools import convert_checkpoint, generate, preprocess_data
from test_huggingface import difference

from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.run_state import config_of
from megatron.config.arguments import parse_arguments
from megatron.data.indexed_dataset import IndexedDataset
from megatron.training.pretrain import pretrain

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.torch")

IDS = 259  # of the tokenizer: bytes and three special tokens
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# rows of the embedding, and fields of each shape; Qwen and DeepSeek pad their vocabularies
SHAPES = {
    "llama": (
        IDS,
        {
            **SMALL,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "qwen3": (320, {**SMALL, "head_dim": 12, "tie_word_embeddings": True}),
    "deepseek_v3": (
        300,
        {
            **SMALL,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
        },
    ),
}


def write_model(folder: Path, kind: str, rows: int, fields: dict):
    """A random model of transformers with a tokenizer of bytes; the model."""
    torch.manual_seed(0)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>"
    ).save_pretrained(folder)
    config = transformers.AutoConfig.for_model(kind, vocab_size=rows, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder)
    return model


def run(tool, *words: object) -> None:
    assert tool.main([str(word) for word in words]) == 0


def train(*words: object) -> None:
    parsed = parse_arguments([str(word) for word in words])
    assert pretrain(parsed.config, parsed.notes) == 0


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("kind", SHAPES)
def test_a_model_is_continued(tmp_path, capsys, monkeypatch, kind):
    rows, fields = SHAPES[kind]
    hf, imported, new = tmp_path / "hf", tmp_path / "imported", tmp_path / "run"
    theirs = write_model(hf, kind, rows, fields)
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"the number {i} is"}) + "\n" for i in range(80)))

    run(convert_checkpoint, "--from-huggingface", hf, "--save", imported)
    tokenizer = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", hf)
    where = ("--input", text, "--output-prefix", tmp_path / "data", "--append-eod")
    words = ("preprocess_data.py", *where, *tokenizer, "--workers", 1)
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    assert not preprocess_data.main()
    train(
        *("--load", imported, "--finetune", "--use-checkpoint-args", "--save", new),
        *("--data-path", tmp_path / "data_text_document", "--split", "1,0,0", "--eval-iters", 0),
        *("--seq-length", 32, "--micro-batch-size", 2, "--train-iters", 2, "--lr", 1e-3),
    )
    assert f"vocabulary {rows} (HuggingFaceTokenizer" in capsys.readouterr().out
    run(generate, "--load", new, "--prompt", "the", "--num-tokens", 3)
    run(generate, "--load", imported, "--prompt", "the", "--num-tokens", 3, "--temperature", 0)
    out = tmp_path / "out"
    run(convert_checkpoint, "--load", new, "--to-huggingface", out)

    ids = torch.tensor(IndexedDataset(tmp_path / "data_text_document").tokens[:40].astype("i8"))
    trained = logits(out, ids[None])
    with open_checkpoint(new) as after, torch.no_grad():
        model = config_of(after.state).model
        assert model.hidden_dropout == model.attention_dropout == 0  # the imported model's
        ours = generate.load_model(after, torch.device("cpu")).logits(ids[None])
        before = theirs(ids[None]).logits
    assert trained.shape[-1] == rows
    assert difference(ours, trained) < 1e-5  # both in fp32
    assert difference(before, trained) > 1e-3  # it was trained
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == kind and config["vocab_size"] == rows
    assert config["eos_token_id"] == 256
    assert transformers.AutoTokenizer.from_pretrained(out)("the")["input_ids"]


def test_rows_beyond_the_tokenizer_can_be_left_out(tmp_path):
    write_model(tmp_path / "hf", "qwen3", *SHAPES["qwen3"])
    words = ("--from-huggingface", tmp_path / "hf", "--save", tmp_path / "run")
    run(convert_checkpoint, *words, "--vocab-size", IDS)
    whole = safetensors.load_file(tmp_path / "hf/model.safetensors")["model.embed_tokens.weight"]
    with open_checkpoint(tmp_path / "run") as checkpoint:
        assert checkpoint.state["vocab_size"] == IDS
        assert torch.equal(checkpoint.read_tensor("embedding.word.weight"), whole[:IDS])


# ---- borders of a folder -------------------------------------------------------------------------


@pytest.fixture
def tied(tmp_path):
    """A folder of a tied Llama, and its tensors."""
    model = {**SHAPES["llama"][1], "tie_word_embeddings": True, "rope_parameters": None}
    write_model(tmp_path / "hf", "llama", IDS, model)
    return tmp_path / "hf", safetensors.load_file(tmp_path / "hf/model.safetensors")


def refused(capsys, folder: Path) -> str:
    words = ["--from-huggingface", str(folder), "--save", str(folder.parent / "refused")]
    assert convert_checkpoint.main(words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_head_beside_a_tied_embedding(tied, is_copy):
    folder, tensors = tied
    word = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = word.clone() if is_copy else word + 1
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    run(convert_checkpoint, "--from-huggingface", folder, "--save", folder.parent / "run")
    ids = torch.arange(20)[None]
    with open_checkpoint(folder.parent / "run") as checkpoint, torch.no_grad():
        assert ("head.weight" in checkpoint.names) == (not is_copy)
        ours = generate.load_model(checkpoint, torch.device("cpu")).logits(ids)
    assert difference(ours, logits(folder, ids)) < 1e-5  # both in fp32


def index(folder: Path, tensors: dict[str, list[str]]) -> None:
    found = {name: file for file, names in tensors.items() for name in names}
    text = json.dumps({"metadata": {}, "weight_map": found})
    (folder / "model.safetensors.index.json").write_text(text)


def split(folder: Path, tensors: dict[str, torch.Tensor], files: int) -> dict[str, list[str]]:
    """The tensors in several files."""
    names = list(tensors)
    found = {}
    for i in range(files):
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        found[file] = names[i::files]
        safetensors.save_file({name: tensors[name] for name in found[file]}, folder / file)
    return found


def test_two_models_in_a_folder_are_refused(tied, capsys):
    folder, tensors = tied
    index(folder, split(folder, tensors, 2))
    assert "two models lie there: model.safetensors" in refused(capsys, folder)
    (folder / "model.safetensors").unlink()
    run(convert_checkpoint, "--from-huggingface", folder, "--save", folder.parent / "good")
    split(folder, tensors, 3)
    assert "two models lie there: model-00001-of-00003" in refused(capsys, folder)


def test_an_index_of_other_files_is_refused(tied, capsys):
    folder, tensors = tied
    (folder / "model.safetensors").unlink()
    files = split(folder, tensors, 2)
    first, second = files
    moved = files[first].pop()
    index(folder, files)
    assert f"{moved} is not of this file in" in refused(capsys, folder)
    index(folder, {first: [*files[first], moved], second: [*files[second], "model.extra"]})
    assert "lists model.extra (1 such tensors)" in refused(capsys, folder)


def test_tensors_that_are_not_used_are_named(tied, capsys):
    folder, tensors = tied
    extra = {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}
    safetensors.save_file(tensors | extra, folder / "model.safetensors")
    assert "without a counterpart here: model.layers.0.self_attn.q_norm" in refused(capsys, folder)
    numbers = {"model.layers.0.mlp.scale": torch.ones(8, dtype=torch.int8)}
    safetensors.save_file(tensors | numbers, folder / "model.safetensors")
    assert "model.layers.0.mlp.scale is of type I8" in refused(capsys, folder)
    twice = {"embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
    safetensors.save_file(tensors | twice, folder / "model.safetensors")
    assert "two tensors of one name: " in refused(capsys, folder)


def test_the_language_model_of_a_multimodal_folder(tied, capsys):
    folder, tensors = tied
    inside = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    vision = {"vision_tower.patch.weight": torch.ones(2, 2)}
    safetensors.save_file(inside | vision, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    del text["tie_word_embeddings"]
    outer = {"model_type": "llava", "text_config": text, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(outer))
    run(convert_checkpoint, "--from-huggingface", folder, "--save", folder.parent / "run")
    assert "outside of the language model, which are not taken over: vision_tower" in (
        capsys.readouterr().out
    )
    with open_checkpoint(folder.parent / "run") as checkpoint:
        found = checkpoint.read_tensor("embedding.word.weight")
    assert torch.equal(found, tensors["model.embed_tokens.weight"])
