"""Configuration files in other layouts: flat names of Megatron's flags, and other programs'."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_lines import check_fields, rows

from megatron.config.arguments import dump_config, parse_arguments
from megatron.config.compatibility import GUIDE
from megatron.config.errors import ArgumentErrors

FLAT = """
num_layers: 24
hidden-size: 1024
--num-attention-heads: 16
swiglu: true
add_bias_linear: false
no-masked-softmax-fusion: false
attention-head-type: multiquery
data_path: 0.3 a 0.7 b
rampup_batch_size: [16, 16, 100]
lr: 6.0e-5
optimizer: adam
save: null
use_distributed_optimizer: true
train-tokens: 6400
language_model: {seq_length: 64, normalization: RMSNorm}
model_parallel: {tensor_model_parallel_size: 2}
"""
FLAGS = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --swiglu --disable-bias-linear "
    "--attention-head-type multiquery --data-path 0.3 a 0.7 b --rampup-batch-size 16 16 100 "
    "--lr 6.0e-5 --optimizer adam --use-distributed-optimizer --train-tokens 6400 --seq-length 64 "
    "--normalization RMSNorm --tensor-model-parallel-size 2"
)
# A functional test of Megatron-LM.
RUNNER = """
ENV_VARS: {NCCL_ALGO: Ring}
TEST_TYPE: regular
METRICS: [lm loss]
MODEL_ARGS:"""
# Entries, and the fields that they set.
ENTRIES = """
wandb_exp_name: llama 8b run 2
    wandb_exp_name = llama 8b run 2
split: "98, 1, 1"
    split = 98, 1, 1
moe_layer_freq: [0, 1, 1]
    moe_layer_freq = [0, 1, 1]
moe_layer_freq: "[0] * 3 + [1] * 58"
    moe_layer_freq = [0] * 3 + [1] * 58
num_experts: [8, 8]
    num_experts = 8
recompute_modules: "[layernorm mlp moe_act]"
    recompute_modules = ('layernorm', 'mlp', 'moe_act')
hierarchical_context_parallel_sizes: "[2 2]"
    hierarchical_context_parallel_sizes = (2, 2)
step_batch_size_schedule: [0:16, 2000000:32]
    step_batch_size_schedule = ('0:16', '2000000:32')
wandb_exp_name: "1.10"
    wandb_exp_name = 1.10
wandb_exp_name: 2024-01-01
    wandb_exp_name = 2024-01-01
save: !!python/name:os.system x
    save = x
window_size: "127, 0"
    window_size = 128
bias_swiglu_fusion: true
persist_layer_norm: false
check_for_nan_in_loss_and_grad: true
    nan_policy = stop
check_for_nan_in_loss_and_grad: false
    nan_policy = skip
clone_scatter_output_in_embedding: true
dry_run: false
"""


def test_a_flat_file_is_the_line_of_its_flags(tmp_path):
    path, of_test = tmp_path / "flat.yaml", tmp_path / "model_config.yaml"
    path.write_text(FLAT)
    of_test.write_text(RUNNER + FLAT.replace("\n", "\n  "))
    for flag, file in (("--config", path), ("--yaml-cfg", path), ("--config", of_test)):
        read = parse_arguments([flag, str(file)])
        line = parse_arguments(FLAGS.split())
        assert (read.config, read.not_done) == (line.config, line.not_done)
        assert sorted(read.notes) == sorted(line.notes)


@pytest.mark.parametrize("entry, wanted", rows(ENTRIES))
def test_entries_of_a_flat_file(tmp_path, entry, wanted):
    path = tmp_path / "flat.yaml"
    path.write_text(entry)
    read = parse_arguments(["--config", str(path)])
    check_fields(read.config, wanted.get("", []))
    assert not read.dry_run


def test_a_refused_flag_of_a_flat_file(tmp_path):
    path = tmp_path / "flat.yaml"
    path.write_text("num_layers: 2\nbert_load: x")
    with pytest.raises(ArgumentErrors, match="--bert-load x: retrieval and BERT models are not"):
        parse_arguments(["--config", str(path)])


def test_the_guide_is_there():
    page, _, title = GUIDE.partition("#")
    text = (Path(__file__).resolve().parents[3] / page).read_text()
    assert "## " + title.replace("-", " ").capitalize() in text


def test_printed_defaults_are_not_given(tmp_path):
    """A file of --print-config holds every default; a DeepSpeed file still wins over those."""
    (tmp_path / "ours.json").write_text(dump_config(parse_arguments(["--lr", "0.5"]).config))
    (tmp_path / "ds.json").write_text('{"gradient_clipping": 0.5}')
    files = ["--config", str(tmp_path / "ours.json")]
    files += ["--deepspeed_config", str(tmp_path / "ds.json")]
    assert parse_arguments(files).config.optimizer.clip_grad == 0.5
    (tmp_path / "ds.json").write_text('{"optimizer": {"params": {"lr": 0.25}}}')
    with pytest.raises(ArgumentErrors, match=r"contradicts --lr 0.5; give --lr 0.25"):
        parse_arguments(files)
