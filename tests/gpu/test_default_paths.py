"""The first thing to run on a GPU: a few iterations of every default path, and the same on a CPU
in fp32. `python -m pytest -m gpu tests/gpu/test_default_paths.py`
"""

import pytest
import torch
from megatron.tools._report.metrics_file import read_metrics

from megatron.training import pretrain as pretrain_module
from pretrain_gpt import main

pytestmark = pytest.mark.gpu

BASE = """--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 256
--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --log-interval 1 --mock-data
--tokenizer-type NullTokenizer --vocab-size 1023 --lr 1e-3 --initial-loss-scale 4096
--eval-interval 2 --eval-iters 1""".split()
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2
--hidden-dropout 0 --attention-dropout 0""".split()
RECOMPUTE = """--recompute-granularity full --recompute-method uniform
--recompute-num-layers 1""".split()
DOCUMENTS = "--reset-attention-mask --reset-position-ids --eod-mask-loss".split()
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 128 --moe-aux-loss-coeff 1e-2".split()
PATHS = {
    "gpt": [],  # dropout 0.1 in attention and hidden states, LayerNorm, biases, tied
    "gpt without dropout": ["--hidden-dropout", "0", "--attention-dropout", "0"],
    "llama": LLAMA,
    "llama, heads of 128": [*LLAMA, "--kv-channels", "128"],
    "llama, documents": [*LLAMA, *DOCUMENTS],
    "llama, window": [*LLAMA, "--window-size", "64"],
    "llama, norms of queries": [*LLAMA, "--qk-layernorm"],
    "llama, soft-cap": [*LLAMA, "--attn-logit-softcapping", "30"],
    "recompute": [*LLAMA, *RECOMPUTE],
    "any order": [*LLAMA, "--no-deterministic-mode"],
    "fused head": [*LLAMA, "--fused-linear-cross-entropy"],
    "offload": [*LLAMA, "--optimizer-cpu-offload"],
    "experts": [*LLAMA, *EXPERTS],
    "experts, a loop of products": [*LLAMA, *EXPERTS, "--grouped-gemm-backend", "torch"],
    "experts, torch's grouped product": [*LLAMA, *EXPERTS, "--grouped-gemm-backend", "grouped-mm"],
}
BOUND = 1e-3  # of a mean over a thousand tokens; single numbers of bf16 are off by up to 2^-8


def losses(folder, *flags: str) -> list[float]:
    folder.mkdir()
    assert main([*BASE, *flags, "--metrics-file", str(folder / "metrics.jsonl")]) == 0
    rows = read_metrics(folder / "metrics.jsonl")
    names = ("lm loss", "lm loss validation")
    return [row[name] for row in rows for name in names if name in row]


@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
@pytest.mark.parametrize("path", PATHS)
def test_a_default_path_trains_as_on_a_cpu(path, precision, tmp_path, monkeypatch, capsys):
    found = losses(tmp_path / "gpu", *PATHS[path], precision)
    banner = capsys.readouterr().out
    assert "the check at start failed" not in banner
    if torch.cuda.get_device_capability() in ((8, 0), (9, 0)):
        assert "norm triton" in banner and "cross-entropy triton" in banner
    monkeypatch.setattr(pretrain_module, "choose_device", lambda *_: (torch.device("cpu"), "gloo"))
    expected = losses(tmp_path / "cpu", *PATHS[path])
    assert len(found) == len(expected) > 4
    assert found == pytest.approx(expected, rel=BOUND)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="products of 8-bit floats need compute capability 9.0",
)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_products_of_8_bit_floats_train_as_their_definition(recipe, tmp_path, monkeypatch, capsys):
    if recipe == "blockwise" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch scales blocks on compute capability 9.0 alone")
    form = "e4m3" if recipe == "blockwise" else "hybrid"
    fp8 = f"--bf16 --fp8-format {form} --fp8-recipe {recipe} --fp8-min-width 256".split()
    found = losses(tmp_path / "gpu", *LLAMA, *fp8)
    monkeypatch.setattr(pretrain_module, "choose_device", lambda *_: (torch.device("cpu"), "gloo"))
    expected = losses(tmp_path / "cpu", *LLAMA, *fp8)
    assert found == pytest.approx(expected, rel=BOUND)


@pytest.mark.parametrize("path", ["gpt", "llama"])
def test_replayed_graphs_have_the_same_bits(path, tmp_path, capsys):
    flags = [*PATHS[path], "--bf16"]
    expected = losses(tmp_path / "eager", *flags)
    assert losses(tmp_path / "graphs", *flags, "--cuda-graphs") == expected


@pytest.mark.parametrize("path", ["gpt without dropout", "llama", "recompute"])
def test_compiled_layers_train_as_others(path, tmp_path, capsys):
    flags = [*PATHS[path], "--bf16"]
    expected = losses(tmp_path / "eager", *flags)
    found = losses(tmp_path / "compiled", *flags, "--torch-compile")
    assert found == pytest.approx(expected, rel=BOUND)
