"""Rules between flags: each refuses what it should with the flag and the fix; derived values carry
their reason.
"""

from __future__ import annotations

import itertools
import json
import math
import re

import pytest
from config_lines import check_fields, configure, faults, ranked, resolved
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.derive import RunView, condition_text
from megatron.config.groups import Config
from megatron.config.options import FIELDS, read_table
from megatron.config.rules import EXCLUSIONS, field_of, ranges, tables
from megatron.config.validate import cross_field_faults, resolve


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.bin", "a.idx", "b.bin", "b.idx", "tokenizer.model", "vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "ckpt").mkdir()


# Ranks and flags, and a part of each fault: one row for each function, and for each kind of row of
# a table.
RULES = """
# shapes
--num-attention-heads 5
    --hidden-size 64: must be a multiple of --num-attention-heads 5; the nearest is 65, or give --kv
--group-query-attention
    --group-query-attention: set --num-query-groups
--group-query-attention --num-query-groups 3
    --num-query-groups 3: must divide --num-attention-heads 4
--num-attention-heads 7 --kv-channels 16 --group-query-attention --num-query-groups 2
    --num-query-groups 2: must divide --num-attention-heads 7; the nearest that fits is 1
--num-query-groups 2
    --num-query-groups 2: has no effect without --group-query-attention
--position-embedding-type rope --rotary-percent 0.2
    --rotary-percent 0.2: 3 of 16 channels would rotate
--position-embedding-type rope --rope-scaling-factor 4
    --rope-scaling-factor 4: has no effect without --position-embedding-type yarn or --use-rope
--position-embedding-type rope --use-rope-scaling --rope-high-freq-factor 1
    --rope-high-freq-factor 1: must be greater
--window-size 8 --window-attn-skip-freq [1,0,1]
    --window-attn-skip-freq: '[1,0,1]' has 3 entries, and --num-layers is
--window-size 8 --window-attn-skip-freq 0
    --window-attn-skip-freq: '0': give 1 or more
--position-embedding-type rope --no-rope-freq every
    --no-rope-freq: 'every' is neither a number nor a list of 0 and 1
--swiglu --hidden-size 16
    --ffn-hidden-size is required: 8/3 x hidden-size rounded down to a multiple of 64 is 0 for
--fp16 --loss-scale 128 --hysteresis 3
    --hysteresis 3: has no effect without dynamic loss scaling

# data and tokenizer
--data-path a
    --data-path a: is not supported with --mock-data; keep one kind of data
--tokenizer-type HuggingFaceTokenizer --vocab-size 101 --tokenizer-model none.json
    --tokenizer-model none.json: no such file or folder; tokenizers are read from local files
--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.model
    --vocab-size 100: must be at least the 101 tokens of the tokenizer
--padded-vocab-size 100
    must be at least the 101 tokens of the tokenizer, or give --vocab-size one smaller

# batch, length and learning rate
--global-batch-size 15
    must be a multiple of --micro-batch-size 2 x 1 data-parallel rank(s) = 2; the nearest is 16
--global-batch-size 16 --rampup-batch-size 4 4
    --rampup-batch-size 4 4: must be three numbers above 0: start increment samples
--global-batch-size 16 --rampup-batch-size 4 3 100
    --rampup-batch-size 4 3 100: start and increment must be multiples of
--global-batch-size 16 --rampup-batch-size 4 8 100
    --rampup-batch-size 4 8 100: --global-batch-size 16 must be the start plus 1 to
--global-batch-size 400008 --rampup-batch-size 4 4 100
    --rampup-batch-size 4 4 100: --global-batch-size 400008 must be the start plus 1 to 100,000
--global-batch-size 16 --step-batch-size-schedule 0:4 1K:8
    --global-batch-size 16: contradicts the last step of --step-batch-size-schedule
--step-batch-size-schedule 0:5,1K:8 --micro-batch-size 2
    --step-batch-size-schedule 0:5 1000:8: 5 must be a multiple of --micro-batch-size 2
--step-batch-size-schedule 1K:8
    1K:8: the first step must be at 0 tokens
--step-batch-size-schedule 0:8 1:16
    two steps begin at 0 samples
--train-iters 0
    --train-iters 0: nothing would be trained
--lr-decay-samples 100
    --lr-decay-samples 100: the run is measured in --train-iters; use --lr-decay-iters
--skip-train --lr-decay-samples 100 --lr-warmup-fraction 0.1
    --lr-decay-samples 100: the run is measured in --train-iters; use --lr-decay-iters
--lr-warmup-iters 10
    --lr-warmup-iters 10: must be smaller than --lr-decay-iters 10
--lr-decay-style WSD
    --lr-decay-style WSD: give --lr-wsd-decay-iters
--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-warmup-iters 2
    --lr-wsd-decay-iters 9: does not fit
--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-warmup-fraction 0.2
    --lr-wsd-decay-iters 9: does not fit
--min-lr 1
    --lr 0.001: must be at least --min-lr 1
--min-lr 1e-4 --decoupled-lr 1e-5
    --decoupled-lr 1e-05: must be at least --min-lr 0.0001

# recomputation, offload, pieces of the sequence
--activation-offload --offload-modules attn_proj
    --offload-modules attn_proj: core attention keeps attn_proj's input too
--activation-offload --offload-modules layer_input
    --offload-modules layer_input: layer_input needs recomputed layers
--activation-offload --offload-modules mlp_act --recompute-granularity full
    --offload-modules mlp_act: --recompute-granularity full keeps only layer inputs
--activation-offload --torch-compile
    --activation-offload: is not supported with --torch-compile
--recompute-granularity full --recompute-method block
    --recompute-method block: set --recompute-num-layers
--recompute-granularity selective --recompute-modules mla_up_proj
    mla_up_proj needs --multi-latent-attention; give qkv
--recompute-layers mlp+full*2
    'full' is none of none, full, core_attn
--recompute-layers moe*2
    --recompute-modules or --recompute-layers: moe and moe_act need --num-experts
--recompute-layers none*3
    --recompute-layers none*3: covers 3 layers, not --num-layers 2
4 --tensor-model-parallel-size 4 --checkpoint-activations --hidden-size 34 --micro-batch-size 1 \
--seq-length 31 --kv-channels 8 --ffn-hidden-size 64 --distribute-saved-activations
    --distribute-saved-activations: the 1054 elements of a layer's input are not
4 --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --seq-length 64 \
--global-batch-size 2 --tiled-mlp 32
    --tiled-mlp 32: must divide the 16 positions of the sequence that a rank holds

# files
--save ckpt --save-interval 4 --save-retain-interval 10
    --save-retain-interval 10: must be a multiple of --save-interval
--save ckpt --save-interval 0 --save-retain-interval 10
    --save-retain-interval 10: set --save-interval, of which it is a multiple
--load absent
    --load absent: no such folder; for a first start give the same folder as --save
--save a.bin
    --save a.bin: is a file, not a folder
--save /dev/null/x
    --save /dev/null/x: cannot be made: /dev/null is not a folder
--metrics-file a.bin/metrics.jsonl
    --metrics-file a.bin/metrics.jsonl: its folder is a file, not a folder
--metrics-file ckpt --pipeline-timeline a.bin/b/timeline.json
    --metrics-file ckpt: is a folder; give a file in it
    --pipeline-timeline a.bin/b/timeline.json: its folder cannot be made
--profile --save ckpt --profile-ranks 0 1
    --profile-ranks 0 1: there is no rank 1; ranks count from 0
--num-layers 1000000000
    --num-layers 1000000000: must be from 1 to 10,000

# tensor-parallel ranks
6 --tensor-model-parallel-size 4
    --pipeline-model-parallel-size 1: does not divide the 6 rank(s) of this job; start 8
3 --tensor-model-parallel-size 3 --ffn-hidden-size 255
    --tensor-model-parallel-size 3: must divide --num-attention-heads 4; the nearest that fits
3 --tensor-model-parallel-size 3 --ffn-hidden-size 255 --tiled-mlp 5
    --tiled-mlp 5: must divide the 32 positions of the sequence that a rank holds
    --tensor-model-parallel-size 3: must divide --num-attention-heads 4; the nearest that fits
16 --num-attention-heads 16 --group-query-attention --num-query-groups 8 \
--tensor-model-parallel-size 16
12 --num-attention-heads 12 --hidden-size 96 --group-query-attention --num-query-groups 6 \
--tensor-model-parallel-size 4
    --tensor-model-parallel-size 4: must divide --num-query-groups 6 or be a \
multiple of it; the nearest that fits is 3

--bf16 --zero-stage 3 --param-cpu-offload --cuda-graphs
    --cuda-graphs: is not supported with --zero-stage 3, whose gradient buffers move; set
2 --cuda-graphs --zero-stage 2
    --cuda-graphs: is not supported with --zero-stage 2, whose gradient buffers move; set

# experts
@experts --moe-router-topk 1
    --moe-router-topk 1: the softmax of one chosen logit is
@experts --activation-offload --offload-modules mlp_norm mlp_act
    --offload-modules mlp_norm mlp_act: activations of experts
@experts --moe-layer-freq [0]*2
    no layer has experts; drop --num-experts
@experts --moe-router-num-groups 8 --moe-router-group-topk 2 --moe-router-topk 4
    2 groups of 1 experts hold fewer than --moe-router-topk 4; give 4 or more
@experts --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.01
    must be one number for each of --moe-router-load-balancing-type
@experts --moe-aux-loss-coeff -1
    --moe-aux-loss-coeff -1: must be 0 or more
@experts --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.01
    --moe-aux-loss-coeff 0.01: --moe-router-load-balancing-type none has no loss for none; give
2 @experts --expert-model-parallel-size 4
    must divide the 2 rank(s) of a pipeline stage
2 @experts --tensor-model-parallel-size 2
    would all send the same tokens to experts; set --sequence-parallel
2 @experts --overlap-moe-expert-parallel-comm --expert-model-parallel-size 2
    has no effect with one micro-batch a step
2 --num-experts 1 --expert-model-parallel-size 2
    --expert-model-parallel-size 2: has no effect without --num-experts
--recompute-granularity selective --recompute-modules moe
    --recompute-layers: moe and moe_act need --num-experts; give mlp or mlp_act
@experts --recompute-granularity selective --recompute-modules layernorm mlp_act
    mlp and mlp_act need a dense MLP
@experts --recompute-layers mlp+qkv none
    mlp and mlp_act need a dense MLP
@experts --moe-layer-freq [1]*2 --recompute-layers mlp none
    mlp and mlp_act need a dense MLP
@experts --moe-layer-freq [1,0] --recompute-layers none mlp
@experts --recompute-layers mlp none --moe-shared-expert-intermediate-size 64

# latent attention
@latent --rope-type rope --position-embedding-type yarn
    contradicts --position-embedding-type yarn
@latent --rope-type rope --rotary-scaling-factor 40 --mscale-all-dim 1
    --rope-scaling-factor 40: has no effect without --position-embedding-type yarn or --use-rope
    --mscale-all-dim 1: has no effect without --position-embedding-type yarn
    --rope-type rope with --rope-scaling-factor 40 and --mscale-all-dim 1
--rope-type yarn
    --rope-type yarn: is a setting of --multi-latent-attention
@latent --qk-pos-emb-head-dim 7
    channels rotate in pairs; give 8
@latent --v-head-dim 193
    must be at most 192, the channels of a key

# ZeRO
8 --zero-stage 1 --zero-shard-size 3
    --zero-shard-size 3: must divide the 8 data- x context-parallel rank(s); the nearest
8 --zero-stage 0 --zero-shard-size 4
    --zero-shard-size 4: has no effect without --zero-stage above 0 over several ranks; remove it
1048576 --zero-stage 1 --zero-shard-size 7
    the nearest that fits is 8

# context parallelism
3 --context-parallel-size 3 --seq-length 64
    --seq-length 64: must be a multiple of 6 with --context-parallel-size 3; the nearest is 66
4 --context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4
    must be two sizes, of the ranks that exchange heads and of the ring, with the product
4 --context-parallel-size 4 --cp-comm-type p2p --attention-dropout 0.1 --seq-length 48
    must be a multiple of 32 with --attention-dropout in a ring of 4 ranks, four keys at a time

# 8-bit floats
--fp8-format e4m3 --fp8-min-width 129
    no linear layer has 129 inputs and outputs, the widest has 64 of the fewer
--fp8-recipe rowwise
    --fp8-recipe rowwise: has no effect without --fp8-format
--fp8-format hybrid --fp8-min-width 64 --tiled-mlp 2
    --tiled-mlp 2: a piece holds other tokens in each layout, and has its own scale with \
    --fp8-recipe tensorwise; set --fp8-recipe rowwise or blockwise
2 --fp8-format e4m3 --fp8-min-width 64 --fp8-recipe blockwise --no-fp8-wgrad --hidden-size 256 \
--ffn-hidden-size 384 --tensor-model-parallel-size 2
    mlp.fc1 has 192 outputs on each tensor-parallel rank
    mlp.fc2 has 192 inputs on each tensor-parallel rank
# one of its three blocks would have rows of gate and of up
2 --fp8-format e4m3 --fp8-min-width 512 --fp8-recipe blockwise --no-fp8-wgrad --hidden-size 512 \
--ffn-hidden-size 384 --swiglu --tensor-model-parallel-size 2
    mlp.fc1 has 384 outputs on each tensor-parallel rank, and --fp8-recipe blockwise needs a \
multiple of 256
2 --fp8-format e4m3 --fp8-min-width 64 --fp8-recipe blockwise --hidden-size 256 \
--ffn-hidden-size 512 --seq-length 256 --context-parallel-size 2
    blocks of tokens would hold other tokens than in one process; set --no-fp8-wgrad

# stages of a pipeline
4 --num-layers 30 @pp 4
    --num-layers 30: 4 pipeline rank(s) must share 30 layers evenly, and each rank's must be a \
multiple of @virtual 1; the nearest is 32, or give
8 --num-layers 3 @pp 8
    multiple of @virtual 1; the nearest is 8, or give fewer stages
4 --num-layers 12 @pp 4 @virtual 2
    multiple of @virtual 2; the nearest is 16
4 --num-layers 8 @pp 4 @loss
    --num-layers 8 with --account-for-loss-in-pipeline-split: 4 pipeline rank(s) must share 9 \
layers evenly, and each rank's must be a multiple of @virtual 1; the nearest is 7
4 --num-layers 16 @pp 4 @per_virtual 3
    multiple of @per_virtual 3; the nearest is 12
4 --num-layers 16 @pp 4 @per_virtual 2 @virtual 4
    @per_virtual 2: contradicts @virtual 4; drop
4 --num-layers 9 @pp 4 @first 3 @virtual 2
    --num-layers 9 with @first 3: 3 pipeline rank(s) must share 6 layers evenly
4 --num-layers 8 @pp 4 @layout auto @first 3
    @layout auto: contradicts @first 3; keep one way
2 --num-layers 2 @pp 2 @layout Et|tL @embedding @per_virtual 1
    @embedding and @per_virtual 1;
2 --num-layers 3 @pp 2 @layout Et|t|tL
    @layout Et|t|tL: has 3 layers (t) in 3 stages; it must have --num-layers 3 in a \
multiple of @pp 2 stages
2 --num-layers 3 @pp 2 @layout Et|tL
    has 2 layers (t) in 2 stages; it must have --num-layers 3 in @pp 2 x @virtual 1 stages
2 --num-layers 4 @pp 2 @layout Et|t|t|tL @virtual 3
    has 4 layers (t) in 4 stages; it must have --num-layers 4 in @pp 2 x @virtual 3 stages
8 --num-layers 8 @pp 8 @layout auto @virtual 2
    @pp 8 x @virtual 2: more stages than units of --num-layers 8
4 --num-layers 8 @pp 4 --pipeline-schedule interleaved
    takes 2 or more stage(s) on each pipeline rank, and @virtual 1 makes 1; change that, or give
2 --num-layers 4 @pp 2 --pipeline-schedule zero-bubble @layout Et|t|t|tL
    takes 1 stage(s) on each pipeline rank, and @layout Et|t|t|tL makes 2
4 --num-layers 8 @pp 4 --pipeline-schedule zero-bubble-v @virtual 1
    @virtual 1 makes 1; change

# rows of the other tables of rules.py, each by a run that it refuses
4 --tensor-model-parallel-size 4 --sequence-parallel --seq-length 30
    --seq-length 30: must be a multiple of --tensor-model-parallel-size 4
--weight-decay-incr-style cosine --end-weight-decay 0.1
    --weight-decay-incr-style cosine: set --start-weight-decay
--checkpoint-activations --recompute-num-layers 20
    --num-layers 2: must be at least --recompute-num-layers 20
--tokenizer-type SentencePieceTokenizer --vocab-size 101
    --tokenizer-type SentencePieceTokenizer: set --tokenizer-model

# what is missing
!--num-layers
    --num-layers is required
!--train-iters
    --train-iters or --train-samples is required
!--mock-data --tokenizer-type NullTokenizer
    --data-path PREFIX is required (or --train-data-path, or --mock-data)
!--vocab-size
    --tokenizer-type is required; with --mock-data, --vocab-size N is enough

# files of data
!--mock-data --tokenizer-type NullTokenizer --data-path 0.3 a 0.7 b
!--mock-data --tokenizer-type NullTokenizer --data-path a b --split 90,10
!--mock-data --tokenizer-type NullTokenizer --train-data-path a --valid-data-path b
!--mock-data --tokenizer-type NullTokenizer --data-path a c
    --data-path c: no such file: c.idx and c.bin
!--mock-data --tokenizer-type NullTokenizer --data-path None
    --data-path None: no such file: None.idx and None.bin
!--mock-data --tokenizer-type NullTokenizer --data-path 0.3 a b
    --data-path 0.3 a b: give a weight before each prefix
!--mock-data --tokenizer-type NullTokenizer --valid-data-path b
    --train-data-path is required with --valid-data-path

# valid combinations
--num-attention-heads 3 --kv-channels 20
--num-query-groups 4
--position-embedding-type rope --rotary-percent 0.5 --use-rope-scaling --rope-scaling-factor 4
--position-embedding-type yarn --yarn-original-max-position-embeddings 4096
--attention-backend sdpa --attention-dropout 0
--fp16 --initial-loss-scale 4096 --hysteresis 1
--global-batch-size 16 --rampup-batch-size 4 4 100
--lr-decay-style WSD --lr-wsd-decay-iters 3
--lr-decay-iters 100 --lr-warmup-iters 10 --lr-warmup-init 1e-6
--lr-decay-style constant --lr-decay-iters 5 --lr-warmup-iters 10 --decoupled-lr 1e-4 --min-lr 1
--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1
--decoupled-lr 1e-3 --freeze head --untie-embeddings-and-output-weights
--bf16 --main-grads-dtype bf16 --grad-reduce-in-bf16
--optimizer-nvme-offload disk --optimizer-offload-fraction 0.5
--save new --load new/ --save-interval 5 --save-retain-interval 10 --save-keep-last 2
--load ckpt --finetune --no-load-optim
--save-retain-interval 10
--recompute-method block
--recompute-activations --recompute-method block
--save new --async-save --local-checkpoint-dir a --local-save-interval 5
--tiled-mlp 16 --seq-length 16 --recompute-activations
"""


@pytest.mark.parametrize("ranks, flags, texts", ranked(RULES))
def test_faults(ranks, flags, texts):
    found = faults(flags, ranks)
    assert len(found) == len(texts), found
    assert all(text in fault for text, fault in zip(texts, found, strict=True)), found


NOTES = """
--check-data
    --check-data: has no effect without data files
--lr-decay-style constant --min-lr 1e-4
    --min-lr 0.0001: has no effect without a --lr-decay-style that decays
--no-load-optim
    --no-load-optim: has no effect without --load
--split 9,1
    --split 9,1: has no effect without --data-path
--rope-low-freq-factor 2
    --rope-low-freq-factor 2: has no effect without --position-embedding-type rope and --use-rope-sc
@latent --latent-norm-epsilon 1e-6
    --latent-norm-epsilon 1e-06: has no effect without --qk-layernorm
--mscale 2
    --mscale 2: has no effect without --position-embedding-type yarn and --multi-latent-attention
    --save is not set: no checkpoints or metrics will be written
    --activation gelu is the exact (erf) form
!--mock-data --tokenizer-type NullTokenizer --data-path a
    --vocab-size 100: the end of document is one more id
--bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16
    --exp-avg-sq-dtype bf16: with --adam-beta2 0.999 a step changes the moment by less than bf16
"""


@pytest.mark.parametrize("ranks, flags, texts", ranked(NOTES))
def test_what_does_no_harm_is_a_note(ranks, flags, texts):
    """Launch scripts give flags without effect in every run."""
    notes = resolved(flags, ranks).notes
    assert all(any(note.startswith(text) for note in notes) for text in texts), notes


@pytest.mark.parametrize(
    "file, is_foreign",
    [
        ("model.safetensors", True),
        ("iter_0000010/common.pt", True),
        ("iter_0000010/mp_rank_00/model_optim_rng.pt", True),
        (".metadata", True),
        ("global_step10/mp_rank_00_model_states.pt", True),
        ("metrics.jsonl", False),
        ("iter_0000010/shard-00000.safetensors", False),
    ],
)
def test_a_checkpoint_of_another_program_is_to_be_imported(tmp_path, file, is_foreign):
    (tmp_path / "other" / file).parent.mkdir(parents=True)
    (tmp_path / "other" / file).write_bytes(b"")
    fault = "--load other: holds a checkpoint of another program"
    assert [each.startswith(fault) for each in faults("--load other")] == [True] * is_foreign
    (tmp_path / "other/iter_0000020").mkdir()
    (tmp_path / "other/iter_0000020/MANIFEST.json").write_bytes(b"")
    assert faults("--load other") == []


def test_a_dangling_link_is_named(tmp_path):
    (tmp_path / "run").symlink_to("gone")
    (fault,) = faults("--save run/deeper")
    assert "run is a link to gone, which does not exist; make that" in fault
    (tmp_path / "gone").mkdir()
    assert faults("--save run/deeper") == []
    (tmp_path / "loop").symlink_to("loop")
    assert "is a link to loop, which does not exist" in faults("--tensorboard-dir loop")[0]


def test_a_run_as_it_should_be_has_only_derived_values_as_notes():
    notes = resolved("--window-size 31 --save new --activation gelu-tanh").notes
    assert all(" = " in note for note in notes)


def test_every_bound_is_a_fault_beyond_it():
    bounded = {name: option.bound for name, option in FIELDS.items() if option.bound}
    assert len(bounded) > 80
    for name, bound in bounded.items():
        candidates = map(FIELDS[name].kind, (-1, 0, 1, 1.5, 2**70))
        beyond = [value for value in candidates if not bound.holds(value)]
        assert beyond, name
        for value in beyond:
            config = configure().with_fields(FIELDS[name].group, **{name: value})
            fault = f"@{name}: must be {bound.text}"
            assert fault in ranges(RunView(config, 1, 101))


@pytest.mark.parametrize(
    "condition, text",
    [
        ("optimizer!=adam,sgd", "--optimizer other than adam or sgd"),
        ("eval_iters>0|profile", "--eval-iters above 0 or --profile"),
    ],
)
def test_conditions_in_messages(condition, text):
    assert condition_text(condition) == text


# All pairs of settings that exclude each other, each once.
EXCLUDED = """
activation_offload: recompute overlap_moe_expert_parallel_comm
adam_implementation=apex: exp_avg_dtype exp_avg_sq_dtype optimizer_cpu_offload
attention_backend=sdpa,fa4,gluon: attention_dropout>0 attn_logit_softcapping
cuda_graphs: activation_offload context_parallel_size num_experts recompute recompute_granularity
    recompute_layers tensor_model_parallel_size tiled_mlp torch_compile
    pipeline_schedule=zero-bubble,zero-bubble-v
data_path: mock_data train_data_path valid_data_path test_data_path
distribute_saved_activations: sequence_parallel
fp16: bf16
fp64: adam_implementation=triton bf16 exp_avg_dtype exp_avg_sq_dtype fp16 grad_reduce_in_bf16
local_checkpoint_dir: async_save_host_memory
lr_warmup_fraction: lr_warmup_iters lr_warmup_samples
mock_data: train_data_path valid_data_path test_data_path
moe_expert_capacity_factor: moe_router_force_load_balancing
moe_router_enable_expert_bias: moe_router_score_function=softmax
multi_latent_attention: add_qkv_bias fp8_format group_query_attention no_rope_freq rotary_percent
    rotary_backend=triton torch_compile position_embedding_type=learned_absolute
num_experts: add_bias_linear=True fp8_format tiled_mlp
override_opt_param_scheduler: use_checkpoint_opt_param_scheduler
pipeline_schedule=gpipe,zero-bubble,zero-bubble-v: overlap_moe_expert_parallel_comm
rampup_batch_size: step_batch_size_schedule
recompute_granularity: recompute recompute_layers
rotary_seq_len_interpolation_factor: use_rope_scaling
torch_compile: context_parallel_size num_experts recompute recompute_layers tiled_mlp
    recompute_granularity=selective
train_iters: train_samples
"""


def test_the_exclusions_are_these():
    def pair(one: str, other: str) -> frozenset[frozenset[str]]:
        return frozenset(frozenset(re.split("[=,]", each)) for each in (one, other))

    expected = [
        (one, other) for one, others in read_table(EXCLUDED).items() for other in others.split()
    ]
    table = (map(str.split, settings.split(" / ")) for settings in read_table(EXCLUSIONS))
    found = [each for sides in table for each in itertools.product(*sides)]
    assert {pair(*each) for each in found} == {pair(*each) for each in expected}


def test_each_exclusion_of_the_table_is_a_fault():

    def counting(config: Config, rule: str) -> Config:
        """The configuration with a value of the rule's field with which the rule counts."""
        option = FIELDS[re.match(r"\w+", rule)[0]]
        values = rule.partition("=")[2].split(",") if "=" in rule else ("2", "3", "0.5")
        for word in ("true", "false") if option.kind is bool else (*option.choices, *values):
            if option.choices and str(word) not in map(str, option.choices):
                continue
            value = option.parse([str(word)])
            changed = config.with_fields(option.group, **{option.field: value})
            if RunView(changed, 1, 101).holds(rule):
                return changed
        raise AssertionError(rule)

    for settings, text in read_table(EXCLUSIONS).items():
        for one, other in itertools.product(*map(str.split, settings.split(" / "))):
            run = RunView(counting(counting(configure(), one), other), 1, 101)
            shown = (f"@{field_of(each)}" for each in (one, other))
            fault = ": is not supported with ".join(shown)
            found = [each for each in tables(run) if each.startswith(fault)]
            assert any(text in each for each in found), fault


@given(st.integers(1, 64), st.integers(1, 40), st.integers(1, 40), st.integers(1, 200))
def test_the_proposed_tensor_parallel_size_is_accepted(tp, groups, queries, world):
    flags = (
        f"--num-attention-heads {groups * queries} --kv-channels 16 --group-query-attention "
        f"--num-query-groups {groups} --ffn-hidden-size {math.lcm(*range(1, 9))} "
        "--tensor-model-parallel-size"
    )

    def found(size: int | str) -> list[str]:
        every = faults(f"{flags} {size}", world)
        return [fault for fault in every if fault.startswith("--tensor-model")]

    proposed = {match[1] for text in found(tp) if (match := re.search(r"fits is (\d+)$", text))}
    assert len(proposed) <= 1
    assert not any(found(size) for size in proposed)


def test_derived_values_and_their_reasons():
    flags = "--swiglu --checkpoint-activations"
    after = resolved(flags, 4)
    before = configure(flags).to_dict()
    changed = {
        field: value
        for group, fields in after.config.to_dict().items()
        for field, value in fields.items()
        if value != before[group][field]
    }
    assert changed == {
        "ffn_hidden_size": 128,
        "kv_channels": 16,
        "num_query_groups": 4,
        "max_position_embeddings": 32,
        "global_batch_size": 8,
        "recompute_num_layers": 1,
        "tokenizer_type": "NullTokenizer",
        "lr_decay_iters": 10,
        "num_virtual_stages_per_pipeline_rank": 1,
        "pipeline_schedule": "1f1b",
    }
    # never silently, but for the one stage that was not chosen
    noted = {note.split(" = ")[0].replace("-", "_") for note in after.notes if " = " in note}
    assert noted == changed.keys() - {"num_virtual_stages_per_pipeline_rank", "pipeline_schedule"}
    assert "global-batch-size = 8: micro-batch-size x 4 data-parallel rank(s)" in after.notes
    wide = resolve(configure("--hidden-size 4096 --swiglu"), 1, None).config
    assert wide.model.ffn_hidden_size == int(4 * 4096 * 2 / 3 / 64) * 64 == 10880


# What follows from flags: `field = value` of each line.
DERIVED = """
2 @experts --tensor-model-parallel-size 2 --sequence-parallel
    expert_tensor_parallel_size = 2
    moe_ffn_hidden_size = 256
--num-experts 1
    num_experts = None
@experts --moe-expert-capacity-factor -1
    moe_expert_capacity_factor = None
--profile
    profile_dir = profile
--profile --tensorboard-dir tb
    profile_dir = tb
--profile --save run
    profile_dir = None
!--train-iters --train-samples 100
    lr_decay_samples = 100
    lr_decay_iters = None
!--lr !--train-iters --skip-train --load ckpt
    train_iters = 0
    lr = 0.0
# 0 is never, as in Megatron-LM
--exit-interval 0 --exit-duration-in-mins 0 --save-interval 0 --eval-interval 0 --save x
    exit_interval = None
    exit_duration_in_mins = None
    save_interval = None
    eval_interval = None
"""


@pytest.mark.parametrize("ranks, flags, wanted", ranked(DERIVED))
def test_what_is_not_given_follows(ranks, flags, wanted):
    config = resolved(flags, ranks).config
    check_fields(config, wanted)
    again = resolve(Config.from_dict(json.loads(json.dumps(config.to_dict()))), ranks, 101)
    assert again.config == config and not any(" = " in note for note in again.notes)


@pytest.mark.parametrize(
    "ranks, flags",
    [
        (1, ""),
        (4, "--num-layers 8 @pp 2 --context-parallel-size 2"),
        (2, "@experts --tensor-model-parallel-size 2 --sequence-parallel"),
        (1, "--fp8-format hybrid --fp8-recipe rowwise --fp8-min-width 64 --tiled-mlp 2"),
    ],
)
def test_rules_survive_any_single_odd_value(ranks, flags):
    """No combination of one field's extreme value with a valid run makes a rule itself fail."""
    config = configure(flags)
    for option in FIELDS.values():
        odd = (None, -1, 0, 10**9) if option.kind is int and not option.many else (None,)
        for value in odd:
            if value is not None or option.default is None:
                changed = config.with_fields(option.group, **{option.field: value})
                cross_field_faults(changed, ranks, 101)
