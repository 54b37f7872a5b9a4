"""The table of foreign flags: well-formed, and what it makes of real launch scripts (their flags and values, as facts)."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megatron.config import compatibility
from megatron.config.arguments import options, options_by_flag, parse_arguments
from megatron.config.compatibility import EQUALS, TABLE, VALUES
from megatron.config.errors import ArgumentErrors
from megatron.config.groups import Config
from megatron.config.stages import layers_of_stages
from megatron.config.validate import resolve

# Megatron-LM examples/gpt3/train_gpt3_175b_distributed.sh
GPT3 = """
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
    --attention-backend auto --micro-batch-size 1 --global-batch-size 1536 --step-batch-size-schedule '0:16 2.4B:320 4.8B:624
    7.2B:928 9.6B:1232 12B:1536' --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006
    --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --vocab-file vocab.json --merge-file merges.txt --data-path
    corpus_text_document --split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000 --save ckpt --load ckpt
    --eval-iters 10 --tensorboard-dir tb
"""

# Megatron-LM examples/llama/train_llama3_8b_h100_fp8.sh, with mock data
LLAMA3 = """
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
    --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --normalization RMSNorm
    --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights
    --disable-bias-linear --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
    --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style
    cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16
    --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --fp8-format hybrid --fp8-amax-history-len 1024
    --fp8-amax-compute-algo max --fp8-param-gather --tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2 --split "'99,1,0'"
    --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32 --eval-interval
    100 --save-interval 1000 --log-throughput --profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
    --distributed-timeout-minutes 60 --save ckpt --load ckpt --tensorboard-dir tb
"""

# Megatron-DeepSpeed examples_deepspeed/pretrain_llama2_distributed.sh
LLAMA2 = """
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 24 --hidden-size 2048 --ffn-hidden-size 5504
    --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 32 --seq-length 2048 --max-position-embeddings 2048
    --train-iters 250000 --save ckpt --load ckpt --data-path 1 corpus_text_document --data-impl mmap --tokenizer-type
    GPTSentencePieceTokenizer --tokenizer-model tokenizer.model --split 949,50,1 --distributed-backend nccl --lr 3e-4
    --lr-decay-style cosine --min-lr 3e-5 --weight-decay 0.1 --clip-grad 1 --lr-warmup-iters 2000 --optimizer adam --adam-beta1 0.9
    --adam-beta2 0.95 --log-interval 1 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --bf16
    --no-query-key-layer-scaling --attention-dropout 0 --hidden-dropout 0 --use-rotary-position-embeddings
    --untie-embeddings-and-output-weights --swiglu --normalization rmsnorm --disable-bias-linear --num-key-value-heads 4
    --recompute-granularity full --recompute-method uniform --zero-stage=0 --deepspeed_config=llama2.json --deepspeed
    --deepspeed-activation-checkpointing
"""
LLAMA2_JSON = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 1, "zero_optimization": {"stage": 0},
               "bf16": {"enabled": True}}

# Megatron-DeepSpeed examples_deepspeed/rebase/ds_pretrain_gpt_1.3B.sh
DENSE = """
    --vocab-file vocab.json --merge-file merges.txt --data-path corpus_text_document --data-impl mmap --override-opt_param-scheduler
    --adam-beta1 0.9 --adam-beta2 0.95 --tensor-model-parallel-size 1 --init-method-std 0.013 --lr-decay-tokens 300000000000
    --lr-warmup-tokens 375000000 --micro-batch-size 2 --exit-duration-in-mins 30000000 --global-batch-size 512 --num-layers 24
    --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --train-tokens 300000000000
    --train-samples 146484375 --lr 2.0e-4 --min-lr 1.0e-6 --lr-decay-style cosine --split 949,50,1 --log-interval 10 --eval-interval
    100 --eval-iters 10 --save-interval 10000 --weight-decay 0.1 --clip-grad 1.0 --hysteresis 2 --num-workers 0 --fp16 --seed 1234
    --load ckpt --save ckpt --no-async-tensor-model-parallel-allreduce --tensorboard-queue-size 1 --log-timers-to-tensorboard
    --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard --tensorboard-dir tb --checkpoint-activations
    --log-optimizer-states-to-tensorboard --deepspeed --deepspeed_config dense.json --zero-stage 0 --pipeline-model-parallel-size 1
    --no-pipeline-parallel --deepspeed-activation-checkpointing
"""
DENSE_JSON = {"train_batch_size": 512, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 10, "zero_optimization": {"stage": 0},
              "gradient_clipping": 1.0, "prescale_gradients": True, "wall_clock_breakdown": False,
              "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
                       "initial_scale_power": 11}}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working folder that holds the files which the scripts name."""
    monkeypatch.chdir(tmp_path)
    for name in ("vocab.json", "merges.txt", "tokenizer.model", "corpus_text_document.bin", "corpus_text_document.idx"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "llama2.json").write_text(json.dumps(LLAMA2_JSON))
    (tmp_path / "dense.json").write_text(json.dumps(DENSE_JSON))
    return tmp_path


@pytest.mark.parametrize("script, faults", [
    (GPT3, ["--step-batch-size-schedule"]),
    (LLAMA3, ["--decoupled-lr", "--decoupled-min-lr", "--fp8-format hybrid", "--fp8-param-gather"]),
    (DENSE, ["--lr-decay-tokens", "--lr-warmup-tokens", "--train-tokens", "--deepspeed_config dense.json: fp16.loss_scale_window = 500",
             "--deepspeed_config dense.json: fp16.initial_scale_power = 11"]),
], ids=["gpt3", "llama3", "dense"])
def test_what_a_launch_script_must_change(folder, script, faults):
    with pytest.raises(ArgumentErrors) as caught:
        parse_arguments(shlex.split(script))
    assert len(caught.value.faults) == len(faults), caught.value
    for text, fault in zip(faults, caught.value.faults, strict=True):
        assert fault.startswith(text), fault


def without(script: str, flags: str) -> list[str]:
    """The script with some of its flags, and the words after them, taken out."""
    words, kept, dropping = shlex.split(script), [], False
    for word in words:
        if word.startswith("--"):
            dropping = word in flags.split()
        kept += [] if dropping else [word]
    return kept


def test_the_launch_scripts_run_after_these_edits(folder):
    gpt3 = parse_arguments([*without(GPT3, "--step-batch-size-schedule"), "--dry-run", "--world-size", "512"])
    config = resolve(gpt3.config, 512, 50257).config
    assert (config.data.tokenizer_type, config.distributed.pipeline_schedule) == ("GPT2BPETokenizer", "1f1b")
    assert layers_of_stages(config) == (6,) * 16
    llama3 = parse_arguments(without(LLAMA3, "--decoupled-lr --decoupled-min-lr --fp8-format --fp8-param-gather"))
    assert resolve(llama3.config, 8, 128257).config.distributed.zero_stage == llama3.config.distributed.zero_stage == 1
    config = resolve(llama3.config, 1, 128257).config
    assert config.model.activation == "swiglu" and config.data.split == "99,1,0" and config.precision.bf16
    assert config.distributed.zero_stage == 0 and config.distributed.overlap_param_gather
    assert config.distributed.grad_reduce_in_bf16 and not config.distributed.sequence_parallel
    llama2 = parse_arguments([*shlex.split(LLAMA2), "--dry-run", "--world-size", "8"])  # as it stands
    config = resolve(llama2.config, 8, 32000).config
    assert layers_of_stages(config) == (12, 12) and config.training.global_batch_size == 32
    assert (config.model.num_query_groups, config.model.group_query_attention, config.model.normalization) == (4, True, "RMSNorm")
    assert (config.data.tokenizer_type, config.training.recompute_num_layers) == ("SentencePieceTokenizer", 1)
    dense = without(DENSE, "--lr-decay-tokens --lr-warmup-tokens --train-tokens")
    dense = parse_arguments([*dense, "--loss-scale-window", "500", "--initial-loss-scale", "2048"])
    assert resolve(dense.config, 1, 50257).config.training.recompute_granularity == "full"


VALUE_OF = {"--megatron-fsdp-main-grads-dtype": "bf16", "--megatron-fsdp-grad-comm-dtype": "bf16", "--cross-entropy-fusion-impl": "linear",
            "--activations-checkpoint-method": "uniform"}  # no number


def test_the_table_is_consistent():
    assert len({flag for row in TABLE for flag in row.flags}) == sum(len(row.flags) for row in TABLE)  # no name stands twice
    for row in TABLE:
        assert row.verdict in ("note", "only", "equals", "at least", "not done", "refused") and row.text
        assert (row.values != ()) == (row.verdict == "only") or row.verdict == "not done"
        assert (row.when is None) == (row.otherwise == "") and (row.told is None or row.verdict == "refused")
        for flag in row.flags:
            assert flag.startswith("--") and flag.rstrip("*").replace("*", "") == flag.rstrip("*")
            assert flag not in options_by_flag(), f"{flag} is a field: its row would never act"
    for row in EQUALS:
        parse_arguments([row.flags[0], *([VALUE_OF.get(row.flags[0], "1")] if "$" in row.text else [])])
    fields = {option.names[0]: option for option in options()}
    for (flag, theirs), (ours, _) in VALUES.items():
        assert fields[flag].parse([ours]) != theirs and theirs not in fields[flag].choices


def test_a_longer_family_or_an_exact_name_wins():
    assert compatibility.find("--moe-router-topk").verdict == "note"
    assert compatibility.find("--moe-use-upcycling").verdict == "refused"
    assert compatibility.find("--mamba-inference-conv-states-dtype").text != compatibility.find("--mamba-state-dim").text
    assert compatibility.find("--no-such-flag") is None


@pytest.mark.parametrize("words, faults, notes", [
    ("--zero-stage 4", ["--zero-stage 4: choose from 0, 1, 2, 3"], []),
    ("--accumulate-allreduce-grads-in-fp32", [], ["--accumulate-allreduce-grads-in-fp32: gradients are accumulated and sent in fp32 without"]),
    ("--accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16", ["--accumulate-allreduce-grads-in-fp32: contradicts --grad-reduce"], []),
    ("--accumulate-allreduce-grads-in-fp32 --bf16 --main-grads-dtype bf16", ["--accumulate-allreduce-grads-in-fp32: contradicts --grad-reduce"], []),
    ("--ddp-param-name-patterns-for-fp32-local-accumulation x --bf16 --main-grads-dtype bf16", ["--ddp-param-name-patterns-for-fp32-local-accumulation "
     "x: contradicts --main-grads-dtype bf16"], []),
    ("--use-precision-aware-optimizer --exp-avg-dtype bf16", [], ["--use-precision-aware-optimizer: --main-grads-dtype, --exp-avg-dtype and"]),
    ("--exp-avg-dtype fp8 --exp-avg-sq-dtype fp16", ["--exp-avg-dtype fp8: moments are kept in fp32 or bf16; give --exp-avg-dtype bf16",
                                                     "--exp-avg-sq-dtype fp16: moments are kept"], []),
    ("--main-grads-dtype fp16", ["--main-grads-dtype fp16: gradients are accumulated in fp32 or, with --bf16, in bf16"], []),
    ("--main-params-dtype fp16", ["--main-params-dtype fp16: master weights are fp32"], []),
    ("--num-distributed-optimizer-instances 1 --outer-dp-sharding-strategy no_shard --remote-device none", [], []),
    ("--num-distributed-optimizer-instances 2", ["--num-distributed-optimizer-instances 2: give --zero-shard-size"], []),
    ("--outer-dp-sharding-strategy optim", ["--outer-dp-sharding-strategy optim: copies made by --zero-shard-size share nothing"], []),
    ("--remote-device cpu", ["--remote-device cpu: use --param-cpu-offload"], []),
    ("--enable-full-sharding-in-hsdp --offload-optimizer-states", ["--enable-full-sharding-in-hsdp: ZeRO shards over all", "--offload-optimizer-states: "
     "use --optimizer-cpu-offload"], []),
    ("--zero-reduce-scatter --zero-reduce-bucket-size 1 --ddp-bucket-size 1 --fsdp-double-buffer --megatron-fsdp-version 2", [],
     ["--zero-reduce-scatter: gradients are always", "--zero-reduce-bucket-size, --ddp-bucket-size, --fsdp-double-buffer, --megatron-fsdp-version: "]),
    ("--tp-comm-overlap --no-async-tensor-model-parallel-allreduce", ["--no-async-tensor-model-parallel-allreduce: contradicts"], []),
    ("--tp-comm-overlap-cfg x --disable-tp-comm-bulk-dgrad", [], ["--tp-comm-overlap-cfg, --disable-tp-comm-bulk-dgrad: how the"]),
    ("--zero-stage", ["--zero-stage: no value follows it"], []),
    ("--exit-signal SIGTERM", [], []),
    ("--num-experts 1 --moe-loss-coeff 0.01", [], ["--moe-loss-coeff: acts only in mixture"]),
    ("--num-experts 8 8", ["--num-experts 8 8: mixture of experts is not supported (accepted: 1)"], []),
    ("--no-position-embedding", ["--no-position-embedding: use --position-embedding-type rope or none"], []),
    ("--no-position-embedding --position-embedding-type rope", [], ["--no-position-embedding: rotary positions have no table"]),
    ("--tiktoken-pattern v2 --tokenizer-type TikTokenizer --tokenizer-model .", ["--tiktoken-pattern v2: pattern and special tokens"], []),
    ("--use-flash-attn --use-flash-attn --num-workers 4 --attention-dropout 0", [],
     ["--use-flash-attn: --attention-backend auto", "--num-workers: data order"]),
    ("--attention-backend local", [], ["--attention-backend local is plain here"]),
])
def test_answers(words, faults, notes):
    argv = words.split()
    try:
        parsed = parse_arguments(argv)
        got_faults, got_notes = [], parsed.notes
    except ArgumentErrors as error:
        got_faults = [fault for fault in error.faults if " is required" not in fault]
        got_notes = []
    assert len(got_faults) == len(faults) and all(got.startswith(want) for got, want in zip(got_faults, faults, strict=True)), got_faults
    if not faults:
        assert len(got_notes) == len(notes) and all(got.startswith(want) for got, want in zip(got_notes, notes, strict=True)), got_notes


@pytest.mark.parametrize("words, stage", [
    ("--use-distributed-optimizer", 1),
    ("--use-distributed-optimizer --zero-stage 1", 1),
    ("--zero-stage 2 --use-distributed-optimizer", 2),
    ("--use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params", 3),
    ("--use-megatron-fsdp", 0),
    ("--data-parallel-sharding-strategy no_shard", 0),
    ("--data-parallel-sharding-strategy=optim", 1),
    ("--data-parallel-sharding-strategy optim_grads --zero-stage 2", 2),
    ("--use-torch-fsdp2", 3),
    ("--use-distributed-optimizer --use-distributed-optimizer", 1),
])
def test_names_of_zero_stages(words, stage):
    assert parse_arguments(words.split()).config.distributed.zero_stage == stage


@pytest.mark.parametrize("words, fault", [
    ("--zero-stage 0 --use-distributed-optimizer", "--use-distributed-optimizer: contradicts --zero-stage 0; drop one of them"),
    ("--use-distributed-optimizer --data-parallel-sharding-strategy no_shard", "--use-distributed-optimizer: contradicts "
     "--data-parallel-sharding-strategy no_shard; drop one of them"),
    ("--data-parallel-sharding-strategy optim --zero-stage 2", "--zero-stage 2: contradicts --data-parallel-sharding-strategy optim; drop one"),
    ("--use-torch-fsdp2 --zero-stage 2", "--zero-stage 2: contradicts --use-torch-fsdp2"),
    ("--data-parallel-sharding-strategy full", "--data-parallel-sharding-strategy full: choose from 0, 1, 2, 3"),
    ("--use-distributed-optimizer 1", "--use-distributed-optimizer 1: it takes no value"),
    ("--use-distributed-optimizer --zero-stage x", "--zero-stage x: choose from 0, 1, 2, 3"),
])
def test_stages_that_contradict_are_one_fault(words, fault):
    with pytest.raises(ArgumentErrors) as caught:
        parse_arguments(words.split())
    found = [line for line in caught.value.faults if " is required" not in line]
    assert len(found) == 1 and found[0].startswith(fault), found


def test_a_file_of_settings_and_the_distributed_optimizer(tmp_path):
    """What the command line asks for at least goes over the file's stage, and leaves a higher one."""
    for stage, expected in ((0, 1), (1, 1), (3, 3)):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"distributed": {"zero_stage": stage}}))
        assert parse_arguments(["--config", str(path), "--use-distributed-optimizer"]).config.distributed.zero_stage == expected


def test_other_names_of_precisions_and_offload():
    parsed = parse_arguments("--bf16 --cpu-optimizer --megatron-fsdp-main-grads-dtype bf16 --megatron-fsdp-grad-comm-dtype bf16 "
                             "--megatron-fsdp-main-params-dtype fp32 --use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward".split()).config
    assert parsed.optimizer.optimizer_cpu_offload and parsed.optimizer.main_grads_dtype == "bf16"
    assert parsed.distributed.grad_reduce_in_bf16 and parsed.distributed.zero3_keep_gathered
    assert not parse_arguments("--megatron-fsdp-grad-comm-dtype fp32".split()).config.distributed.grad_reduce_in_bf16


@pytest.mark.parametrize("words, fused", [("linear", True), ("native", False), ("te", False)])
def test_other_names_of_the_fused_head(words, fused):
    parsed = parse_arguments(["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", words])
    assert parsed.config.model.fused_linear_cross_entropy == fused
    assert any("--cross-entropy-backend" in note for note in parsed.notes) == (words == "te")


def test_notes_change_nothing():
    noted = [flag for flag, row in compatibility.rows().items()
             if row.verdict in ("note", "not done") and row.when is None and flag not in options_by_flag()]
    assert len(noted) > 400 and parse_arguments(noted).config == Config()


@pytest.mark.parametrize("words, missing", [
    ("--profile --profile-step-start 4 --profile-step-end 6", ["--profile, --profile-step-start, --profile-step-end: no profile is written"]),
    ("--nvtx-ranges", ["--nvtx-ranges: no profile"]),
    ("--log-straggler", ["--log-straggler: slow ranks"]),
    ("--log-timers-to-tensorboard", ["--log-timers-to-tensorboard: no timer is logged; give --timing-log-level 1"]),
    ("--log-timers-to-tensorboard --timing-log-level 1", []),
    ("--timing-log-level 2", ["--timing-log-level 2: there are no finer timers"]),
    ("--cuda-graph-impl none", []),
    ("--cuda-graph-impl local", ["--cuda-graph-impl: no CUDA graph"]),
    ("--enable-cuda-graph", ["--enable-cuda-graph: no CUDA graph"]),
    ("--attention-backend flash", ["--attention-backend flash: with attention dropout or"]),
    ("--attention-backend fused", ["--attention-backend fused: with attention dropout or"]),
    ("--attention-backend flash --attention-dropout 0", []),
    ("--attention-backend flash --attention-dropout 0 --attn-logit-softcapping 50", ["--attention-backend flash: with"]),
    ("--use-flash-attn --attention-backend plain --attention-dropout 0", ["--use-flash-attn: with attention dropout"]),
    ("--use-flash-attn --attention-backend triton", []),
    ("--partition-activations --tile-factor 1", ["--partition-activations: it saves no memory here"]),
    ("--manual-gc --empty-unused-memory-level 1", ["--empty-unused-memory-level: torch", "--manual-gc: Python"]),
    ("--empty-unused-memory-level 0", []),
    ("--flight-recorder-dump-path x", ["--flight-recorder-dump-path: the environment"]),
])
def test_services_that_do_not_exist_are_not_notes(words, missing):
    parsed = parse_arguments(words.split())
    assert len(parsed.not_done) == len(missing), parsed.not_done
    assert all(any(line.startswith(text) for line in parsed.not_done) for text in missing)
    assert not any(note in line for note in parsed.notes for line in missing)


@pytest.mark.parametrize("words, fault", [
    ("--rerun-mode validate_results", "--rerun-mode validate_results: no step is computed twice"),
    ("--check-weight-hash-across-dp-replicas-interval 5", "--check-weight-hash-across-dp-replicas-interval 5: the weights of replicas"),
    ("--inprocess-restart", "--inprocess-restart: a job that fails is started again by its launcher"),
    ("--inference", "--inference: use --skip-train"),
    ("--disable-bf16-reduced-precision-matmul", "--disable-bf16-reduced-precision-matmul: matrix products of bf16"),
    ("--activations-checkpoint-method block", "--activations-checkpoint-method block: block recompute is not built yet"),
])
def test_what_changes_the_result_or_its_safety_is_refused(words, fault):
    with pytest.raises(ArgumentErrors) as caught:
        parse_arguments(words.split())
    assert caught.value.faults[0].startswith(fault)


def test_earlier_names_of_recompute_are_mapped():
    training = parse_arguments("--activations-checkpoint-method uniform --activations-checkpoint-num-layers 1".split()).config.training
    assert (training.recompute_granularity, training.recompute_method, training.recompute_num_layers) == ("full", "uniform", 1)


def test_a_smaller_batch_is_never_promised():
    (note,) = parse_arguments(["--decrease-batch-size-if-needed"]).notes
    assert note.endswith("the global batch is never made smaller: one that micro-batch-size x data-parallel ranks does not divide is refused")
