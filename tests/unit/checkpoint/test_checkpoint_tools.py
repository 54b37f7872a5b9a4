"""The two checkpoint tools on checkpoints of a small model, with transformers as the judge of what
was exported.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_cases import deal, flip, pairs, same_bits, save_in_shards
from huggingface_models import MODELS
from megatron.tools import convert_checkpoint, generate, inspect_checkpoint
from megatron.tools._convert import huggingface_files
from test_huggingface import VOCAB, build, difference, tokens

from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.writer import save_checkpoint
from megatron.config.groups import Config, DataConfig, PrecisionConfig
from megatron.data.tokenizer import build_tokenizer

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")


FP64 = PrecisionConfig(fp64=True)
NULL = DataConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB - 1)


def save_run(
    root: Path, case: str, precision: PrecisionConfig = FP64, iteration: int = 5
) -> tuple[Config, object, dict]:
    """A checkpoint as a run writes it, with optimizer state; its configuration, model and logical
    tensors.
    """
    config = Config(model=MODELS[case], precision=precision, data=NULL)
    model, held = build(config.model)
    if not precision.fp64:
        held = {name: tensor.float() for name, tensor in held.items()}
    moments = {
        f"optimizer.exp_avg.{name}": torch.zeros_like(tensor) for name, tensor in held.items()
    }
    state = {
        "iteration": iteration,
        "consumed_samples": 8 * iteration,
        "config": config.to_dict(),
        "vocab_size": VOCAB,
        "tokenizer": None,
    }
    save_checkpoint(root, iteration, pairs(held | moments), state)
    return config, model, held


def run(tool, *words) -> int:
    return tool.main([str(word) for word in words])


def export(root: Path, folder: Path, *more: str) -> int:
    return run(convert_checkpoint, "--load", root, "--to-huggingface", folder, *more)


def take_over(folder: Path, root: Path) -> int:
    return run(convert_checkpoint, "--from-huggingface", folder, "--save", root)


def test_an_exported_model_loads_in_transformers_and_comes_back(tmp_path, monkeypatch, capsys):
    """Cut into files with an index."""
    _, model, held = save_run(tmp_path / "run", "gpt2")
    monkeypatch.setattr(huggingface_files, "FILE", 30_000)
    assert export(tmp_path / "run", tmp_path / "hf") == 0
    files = sorted(p.name for p in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "hf" / name).stat().st_size < 40_000 for name in files)
    them = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").eval()
    assert them.dtype == torch.float64 and them.config.eos_token_id == VOCAB - 1
    ours = model.logits(tokens())
    with torch.no_grad():
        assert difference(ours, them(tokens()).logits) < 1e-12

    them.save_pretrained(tmp_path / "again")  # as transformers writes it
    capsys.readouterr()
    assert take_over(tmp_path / "again", tmp_path / "back") == 0
    flags = f"--config {tmp_path}/back/model.json --load {tmp_path}/back --finetune"
    assert flags in capsys.readouterr().out
    with open_checkpoint(tmp_path / "back") as checkpoint:
        assert checkpoint.iteration == 0 and sorted(checkpoint.names) == sorted(held)
        assert all(same_bits(checkpoint.read_tensor(name), held[name]) for name in held)
        loaded = generate.load_model(checkpoint, torch.device("cpu"))
        assert difference(loaded.logits(tokens()), ours) == 0


@pytest.mark.parametrize(("flag", "dtype"), [(None, torch.bfloat16), ("fp16", torch.float16)])
def test_precision_of_the_export(tmp_path, flag, dtype):
    from safetensors.torch import load_file

    _, _, held = save_run(tmp_path / "run", "llama", PrecisionConfig(bf16=True))
    assert export(tmp_path / "run", tmp_path / "hf", *(["--dtype", flag] if flag else [])) == 0
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert same_bits(exported["lm_head.weight"], held["head.weight"].to(dtype))
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert described["torch_dtype"] == str(dtype)[6:]


def test_the_bias_of_experts_keeps_fp32(tmp_path):
    """A step of it is lost in 16 bits; transformers keeps it in fp32, too."""
    from safetensors.torch import load_file

    name = "layers.1.mlp.router.expert_bias"
    theirs = "model.layers.1.mlp.gate.e_score_correction_bias"
    _, _, held = save_run(tmp_path / "run", "glm4_moe", PrecisionConfig(bf16=True))
    assert export(tmp_path / "run", tmp_path / "hf") == 0
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert same_bits(exported.pop(theirs), held[name])
    del exported[theirs.replace("1", "2")]
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    them = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert same_bits(them.state_dict()[theirs], held[name])
    assert take_over(tmp_path / "hf", tmp_path / "back") == 0
    with open_checkpoint(tmp_path / "back") as checkpoint:
        assert same_bits(checkpoint.read_tensor(name), held[name])


def test_tokenizer_files_go_along(tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"w{i}": i for i in range(VOCAB - 1)} | {"<|endoftext|>": VOCAB - 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "my_tokenizer.json"))
    config, _, held = save_run(tmp_path / "first", "llama")
    file = tmp_path / "my_tokenizer.json"
    data = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(file))
    config = dataclasses.replace(config, data=data)
    known = build_tokenizer(data).fingerprint
    state = {"config": config.to_dict(), "vocab_size": VOCAB, "tokenizer": known}
    save_checkpoint(tmp_path / "run", 1, pairs(held), state)
    assert export(tmp_path / "run", tmp_path / "hf") == 0
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == file.read_bytes()
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == VOCAB - 1
    # Replaced by another one, or moved away: the export continues and logs it.
    file.write_text(file.read_text().replace('"w1"', '"another"'))
    capsys.readouterr()
    assert export(tmp_path / "run", tmp_path / "replaced") == 0
    assert "tokenizer.json are not those of the run" in capsys.readouterr().out
    assert not (tmp_path / "replaced" / "tokenizer.json").exists()
    assert not json.loads((tmp_path / "replaced" / "config.json").read_text())["eos_token_id"]
    file.unlink()
    assert export(tmp_path / "run", tmp_path / "second") == 0
    assert not (tmp_path / "second" / "tokenizer.json").exists()


@pytest.mark.parametrize("prefix", [False, True])
def test_transformers_encodes_as_the_sentencepiece_model_of_an_export(tmp_path, prefix):
    """AutoTokenizer would take GPT-2's tokenizer for a folder of model type gpt2. Texts that begin
    with a space differ where the model puts another before them.
    """
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = Path(__file__).read_text().splitlines()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(tmp_path / "spm"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        minloglevel=2,
    )
    data = DataConfig(
        tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(tmp_path / "spm.model")
    )
    described = {"model_type": "gpt2"}
    assert convert_checkpoint._tokenizer_files(data, None, tmp_path, described) == []
    (tmp_path / "config.json").write_text(json.dumps(described))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    texts = [text for text in lines[:200] if not (prefix and text.startswith(" "))]
    assert len(texts) > 50
    for text in ("def test", "two  spaces\nand \u00fc", *texts):
        assert theirs(text)["input_ids"] == ours.encode(text), text
    assert theirs.eos_token_id == ours.eos_id() == described["eos_token_id"]


def write_gpt2_bpe(folder: Path) -> DataConfig:
    """vocab.json and merges.txt of a small vocabulary, in which years are words."""
    library = pytest.importorskip("tokenizers")
    model = library.ByteLevelBPETokenizer()
    lines = [*Path(__file__).read_text().splitlines(), *["in 1984"] * 50]
    model.train_from_iterator(lines, vocab_size=400, special_tokens=["<|endoftext|>"])
    model.save_model(str(folder))
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    return DataConfig(tokenizer_type="GPT2BPETokenizer", **files)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "qwen2", "qwen3", "deepseek_v3"])
def test_transformers_encodes_as_the_byte_pairs_of_an_export(tmp_path, kind):
    """Whatever class the model type has. Qwen's rules cut numbers into digits."""
    data, out = write_gpt2_bpe(tmp_path), tmp_path / "out"
    out.mkdir()
    ours = build_tokenizer(data)
    described = {"model_type": kind}
    notes = convert_checkpoint._tokenizer_files(data, None, out, described)
    (out / "config.json").write_text(json.dumps(described))
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    if kind == "qwen2":  # as the note advises
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(out)
    texts = ("in 1984", " a  b\n\u00fc u\u0308", *Path(__file__).read_text().splitlines()[:200])
    for text in texts:
        assert "<|end" in text or theirs(text)["input_ids"] == ours.encode(text), text
    assert theirs.eos_token_id == ours.eod == described["eos_token_id"]
    assert notes == ([convert_checkpoint.QWEN2_TOKENIZER] if kind == "qwen2" else [])


def test_refusals(tmp_path, capsys):
    config, _, held = save_run(tmp_path / "run", "llama")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "empty").mkdir()
    model = dataclasses.replace(config.model, rotary_percent=0.5, final_logit_softcapping=3.0)
    state = {"config": Config(model=model).to_dict(), "vocab_size": VOCAB}
    save_checkpoint(tmp_path / "odd", 1, pairs(held), state)
    export(tmp_path / "run", tmp_path / "hf")
    pickled, traversal = tmp_path / "pickled", tmp_path / "traversal"
    for folder in (pickled, traversal):
        folder.mkdir()
        shutil.copy(tmp_path / "hf" / "config.json", folder)
    (pickled / "pytorch_model.bin").touch()
    (traversal / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "../hf/model.safetensors"}})
    )
    run_, new = tmp_path / "run", tmp_path / "new"

    def out(*load: object, to: Path = new) -> tuple:
        return ("--load", *load, "--to-huggingface", to)

    def taken(folder: Path, save: Path = new) -> tuple:
        return ("--from-huggingface", folder, "--save", save)

    for words, text in [
        (out(run_, to=tmp_path / "full"), "exists and is not empty"),
        (out(tmp_path / "empty"), "no checkpoint there"),
        (out(run_, "--ckpt-step", 4), "no checkpoint of iteration 4"),
        (out(tmp_path / "odd"), "cannot express: --final-logit-softcapping 3.0"),
        (taken(tmp_path / "hf", run_), "holds checkpoints already"),
        (taken(tmp_path / "empty"), "config.json: cannot be read"),
        (taken(pickled), "pickled weights are not read"),
        (taken(traversal), "not a plain file name"),
    ]:
        assert run(convert_checkpoint, *words) == 2
        assert text in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    for words in ("--load a", "--from-huggingface b --save c --dtype bf16"):
        with pytest.raises(SystemExit):
            run(convert_checkpoint, *words.split())


def test_inspect_shows_verifies_and_names_damage(tmp_path, capsys):
    save_run(tmp_path, "llama", iteration=4)
    _, _, held = save_run(tmp_path, "llama", iteration=5)
    assert run(inspect_checkpoint, tmp_path, "--verify") == 0
    out = capsys.readouterr().out
    for text in (
        "iteration 5, written 2",
        "other iterations there: 4",
        "consumed_samples = 40",
        "model.num_layers = 3",
        "verified: every byte",
        f"weights: {len(held)} tensors",
        f"optimizer: {len(held)} tensors",
        "optimizer.exp_avg.head.weight",
    ):
        assert text in out, text
    row = next(line for line in out.splitlines() if line.split()[:1] == ["head.weight"])
    assert row.split()[1:] == ["F64", f"{VOCAB * 32 * 8:,}", "bytes", f"[{VOCAB},", "32]"]
    assert run(inspect_checkpoint, tmp_path / "iter_0000004") == 0
    assert "iteration 4" in capsys.readouterr().out

    flip(tmp_path / "iter_0000005" / "shard-00000.safetensors")
    assert run(inspect_checkpoint, tmp_path) == 0  # data is not read without --verify
    assert run(inspect_checkpoint, tmp_path, "--verify") == 1
    assert "shard-00000.safetensors: damaged" in capsys.readouterr().err
    assert run(inspect_checkpoint, tmp_path / "nothing") == 2


def test_inspect_diff(tmp_path, capsys):
    save_run(tmp_path / "a", "llama")
    save_run(tmp_path / "b", "llama", PrecisionConfig(bf16=True))
    save_run(tmp_path / "c", "llama biases", iteration=6)
    assert run(inspect_checkpoint, "--diff", tmp_path / "a", tmp_path / "b") == 1
    out = capsys.readouterr().out
    assert "config.precision.bf16: false -> true" in out and "num_layers" not in out
    assert "tensor head.weight: [67, 32] F64 -> [67, 32] F32" in out
    assert run(inspect_checkpoint, "--diff", tmp_path / "a", tmp_path / "c") == 1
    out = capsys.readouterr().out
    assert "iteration: 5 -> 6" in out and "config.model.add_bias_linear: false -> true" in out
    assert "mlp.up.bias: absent -> [80] F64" in out


def test_inspect_compares_values_whatever_the_layout(tmp_path, monkeypatch, capsys):
    _, _, held = save_run(tmp_path / "a", "llama")
    state = open_checkpoint(tmp_path / "a").state
    moments = {
        f"optimizer.exp_avg.{name}": torch.zeros_like(tensor) for name, tensor in held.items()
    }

    def save_cut(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        shards = deal(random.Random(2), tensors, range(3))
        save_in_shards(folder, 5, list(shards.values()), state)

    save_cut(tmp_path / "b", held | moments)
    monkeypatch.setattr(inspect_checkpoint, "PIECE", 3000)
    assert run(inspect_checkpoint, "--diff", tmp_path / "a", tmp_path / "b", "--tensors") == 0
    assert "all values are equal bit for bit" in capsys.readouterr().out
    other = {name: tensor.clone() for name, tensor in (held | moments).items()}
    other["head.weight"][3, 4] += 0.25
    other["head.weight"][66, 31] -= 0.5
    other["optimizer.exp_avg.head.weight"][0, 0] = -0.0
    other["final_norm.weight"][0] = float("nan")
    save_cut(tmp_path / "c", other)
    # values are not read
    assert run(inspect_checkpoint, "--diff", tmp_path / "a", tmp_path / "c") == 0
    capsys.readouterr()
    assert run(inspect_checkpoint, "--diff", tmp_path / "b", tmp_path / "c", "--tensors") == 1
    lines = sorted(line.strip() for line in capsys.readouterr().out.splitlines()[1:])
    assert lines == [
        "tensor final_norm.weight: 1 of 32 values differ; largest difference inf",
        "tensor head.weight: 2 of 2144 values differ; largest difference 0.5",
        "tensor optimizer.exp_avg.head.weight: 1 of 2144 values differ; largest difference 0",
    ]


def test_text_of_a_model_without_a_tokenizer_and_of_another_device(tmp_path, capsys):
    """The run's flags chose kernels that this device does not have."""
    data = write_gpt2_bpe(tmp_path)
    model = dataclasses.replace(MODELS["llama"], rotary_backend="triton", norm_backend="apex")
    model = dataclasses.replace(model, attention_backend="triton")
    _, held = build(model)

    def save(root: Path, rows: int) -> None:
        larger = {name: tensor.new_zeros(rows, 32) for name, tensor in held.items()}
        own = {"embedding.word.weight", "head.weight"}
        tensors = {name: larger[name] if name in own else held[name] for name in held}
        state = {"config": Config(model=model, precision=FP64).to_dict(), "vocab_size": rows}
        save_checkpoint(root, 0, pairs(tensors), state)

    save(tmp_path / "small", VOCAB)
    save(tmp_path / "run", 410)
    files = ("--vocab-file", data.vocab_file, "--merge-file", data.merge_file)
    assert run(generate, "--load", tmp_path / "small", *files) == 2
    assert "has 400 ids" in capsys.readouterr().err
    assert run(generate, "--load", tmp_path / "run") == 2
    shown = capsys.readouterr().err
    assert "--tokenizer-type is missing" in shown and "--mock-data" not in shown
    words = ("--load", tmp_path / "run", "--prompt", "def", "--num-tokens", 2)
    assert run(generate, *words, "--tokenizer-type", "GPT2BPETokenizer", *files) == 0
    assert capsys.readouterr().out.startswith("def")


def test_inspect_refuses_what_it_would_ignore(tmp_path, capsys):
    save_run(tmp_path / "run", "llama")
    folder = tmp_path / "run" / "iter_0000005"
    for words in (("--verify",), ("--ckpt-step", 5)):
        with pytest.raises(SystemExit):
            run(inspect_checkpoint, "--diff", folder, folder, *words)
    assert run(inspect_checkpoint, folder, "--ckpt-step", 5) == 2
    assert "is itself a checkpoint; remove --ckpt-step" in capsys.readouterr().err
    assert run(inspect_checkpoint, tmp_path / "run", "--ckpt-step", 6) == 2  # not 1: damaged
    assert "no checkpoint of iteration 6 (--ckpt-step); there: 5" in capsys.readouterr().err


def test_an_export_without_a_capacity_is_noted(tmp_path, capsys):
    config, _, held = save_run(tmp_path / "run", "mixtral")
    model = dataclasses.replace(config.model, moe_expert_capacity_factor=1.5)
    state = {"config": Config(model=model).to_dict(), "vocab_size": VOCAB}
    save_checkpoint(tmp_path / "capped", 1, pairs(held), state)
    for name, count in (("run", 0), ("capped", 1)):
        assert export(tmp_path / name, tmp_path / f"hf-{name}") == 0
        assert capsys.readouterr().out.count("--moe-expert-capacity-factor 1.5") == count
