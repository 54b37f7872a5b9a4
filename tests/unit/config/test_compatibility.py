"""The table of foreign flags: well-formed, and its answers."""

from __future__ import annotations

import json

import pytest

from megatron.config import compatibility
from megatron.config.arguments import options, options_by_flag, parse_arguments
from megatron.config.compatibility import asks, by_value, table
from megatron.config.errors import ArgumentErrors
from megatron.config.groups import Config

VALUE_OF = {
    "--megatron-fsdp-main-grads-dtype": "bf16",
    "--megatron-fsdp-grad-comm-dtype": "bf16",
    "--cross-entropy-fusion-impl": "linear",
    "--activations-checkpoint-method": "uniform",
}  # no number


def test_the_table_is_consistent():
    # no name stands twice
    assert len({flag for row in table() for flag in row.flags}) == sum(
        len(row.flags) for row in table()
    )
    fields = {option.field: option for option in options()}
    for row in table():
        assert row.flags and row.text
        assert (row.values != ()) == (row.verdict == "only") or row.verdict == "not_done"
        assert row.is_conditional == (row.otherwise != "")
        assert (row.choices is not None) == (row.verdict == "choice")
        for alternative in (row.when or []) + (row.unless or []):
            for field, values in alternative.items():
                each = [value for value in values if value != "None"]
                assert all(fields[field].load(value) == value for value in each), row.flags
                assert len(each) == len(values) or fields[field].optional
        for flag in row.flags:
            assert flag.startswith("--") and flag.rstrip("*").replace("*", "") == flag.rstrip("*")
            assert flag not in options_by_flag(), f"{flag} is a field: its row would never act"
        for value in row.choices or {}:
            parse_arguments([row.flags[0], *([value] if value else [])])
        if row.verdict not in ("equals", "at_least") or row.text.startswith("--config"):
            continue  # a file: see test_settings_files.py
        parse_arguments(
            [row.flags[0], *([VALUE_OF.get(row.flags[0], "1")] if "$" in row.text else [])]
        )
    fields = {option.names[0]: option for option in options()}
    for (flag, theirs), ours in by_value("values").items():
        assert fields[flag].parse([ours]) != theirs and theirs not in fields[flag].choices
    assert all(pair in by_value("values") for pair in (*by_value("value_notes"), *asks()))
    assert not set(by_value("values")) & set(by_value("refused_values"))
    for flag, theirs in by_value("refused_values"):
        assert theirs not in fields[flag].choices


def test_a_longer_family_or_an_exact_name_wins():
    assert compatibility.find("--moe-latent-size").verdict == "note"
    assert compatibility.find("--moe-use-upcycling").verdict == "refused"
    assert (
        compatibility.find("--mamba-inference-conv-states-dtype").text
        != compatibility.find("--mamba-state-dim").text
    )
    assert compatibility.find("--no-such-flag") is None


@pytest.mark.parametrize(
    "words, faults, notes",
    [
        ("--zero-stage 4", ["--zero-stage 4: choose from 0, 1, 2, 3"], []),
        (
            "--accumulate-allreduce-grads-in-fp32",
            [],
            [
                (
                    "--accumulate-allreduce-grads-in-fp32: gradients are accumulated and sent in "
                    "fp32 without"
                )
            ],
        ),
        (
            "--accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16",
            ["--accumulate-allreduce-grads-in-fp32: contradicts --grad-reduce"],
            [],
        ),
        (
            "--accumulate-allreduce-grads-in-fp32 --bf16 --main-grads-dtype bf16",
            ["--accumulate-allreduce-grads-in-fp32: contradicts --grad-reduce"],
            [],
        ),
        (
            (
                "--ddp-param-name-patterns-for-fp32-local-accumulation x --bf16 "
                "--main-grads-dtype bf16"
            ),
            [
                "--ddp-param-name-patterns-for-fp32-local-accumulation "
                "x: contradicts --main-grads-dtype bf16"
            ],
            [],
        ),
        (
            "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp16",
            [
                "--exp-avg-dtype fp8: moments are kept in fp32 or bf16; give --exp-avg-dtype bf16",
                "--exp-avg-sq-dtype fp16: moments are kept",
            ],
            [],
        ),
        ("--main-params-dtype fp16", ["--main-params-dtype fp16: master weights are fp32"], []),
        (
            (
                "--num-distributed-optimizer-instances 1 --outer-dp-sharding-strategy no_shard "
                "--remote-device none"
            ),
            [],
            [],
        ),
        (
            "--tp-comm-overlap --no-async-tensor-model-parallel-allreduce",
            ["--no-async-tensor-model-parallel-allreduce: contradicts"],
            [],
        ),
        ("--zero-stage", ["--zero-stage: no value follows it"], []),
        ("--exit-signal SIGTERM", [], []),
        ("--moe-loss-coeff 0.01", [], ["--moe-loss-coeff: has an effect only in mixture"]),
        (
            "--num-experts 1 --moe-loss-coeff 0.01",
            [],
            ["--moe-loss-coeff: has an effect only in mixture"],
        ),
        ("--attention-head-type multihead --use-torch-compile=0", [], []),
        (
            "--attention-head-type grouped",
            ["--attention-head-type grouped: give --num-query-groups"],
            [],
        ),
        ("--moe-token-dispatcher-type flex", [], ["--moe-token-dispatcher-type flex is alltoall"]),
        (
            "--no-position-embedding",
            ["--no-position-embedding: use --position-embedding-type rope or none"],
            [],
        ),
        (
            "--no-position-embedding --position-embedding-type rope",
            [],
            ["--no-position-embedding: rotary positions have no table"],
        ),
        (
            "--tiktoken-pattern v2 --tokenizer-type TikTokenizer --tokenizer-model .",
            ["--tiktoken-pattern v2: pattern and special tokens"],
            [],
        ),
        (
            "--use-flash-attn --use-flash-attn --num-workers 4 --attention-dropout 0",
            [],
            ["--use-flash-attn: --attention-backend auto", "--num-workers: data order"],
        ),
        ("--attention-backend local", [], ["--attention-backend local is plain here"]),
    ],
)
def test_answers(words, faults, notes):
    argv = words.split()
    try:
        parsed = parse_arguments(argv)
        got_faults, got_notes = [], parsed.notes
    except ArgumentErrors as error:
        got_faults = [fault for fault in error.faults if " is required" not in fault]
        got_notes = []
    assert len(got_faults) == len(faults) and all(
        got.startswith(want) for got, want in zip(got_faults, faults, strict=True)
    ), got_faults
    if not faults:
        assert len(got_notes) == len(notes) and all(
            got.startswith(want) for got, want in zip(got_notes, notes, strict=True)
        ), got_notes


@pytest.mark.parametrize(
    "words, stage",
    [
        ("--use-distributed-optimizer", 1),
        ("--zero-stage 2 --use-distributed-optimizer", 2),
        (
            (
                "--use-megatron-fsdp --use-distributed-optimizer "
                "--data-parallel-sharding-strategy optim_grads_params"
            ),
            3,
        ),
        ("--use-megatron-fsdp", 0),
        ("--data-parallel-sharding-strategy no_shard", 0),
        ("--data-parallel-sharding-strategy optim_grads --zero-stage 2", 2),
        ("--use-torch-fsdp2", 3),
    ],
)
def test_names_of_zero_stages(words, stage):
    assert parse_arguments(words.split()).config.distributed.zero_stage == stage


@pytest.mark.parametrize(
    "words, fault",
    [
        (
            "--zero-stage 0 --use-distributed-optimizer",
            "--use-distributed-optimizer: contradicts --zero-stage 0; drop one of them",
        ),
        (
            "--use-distributed-optimizer --data-parallel-sharding-strategy no_shard",
            "--use-distributed-optimizer: contradicts "
            "--data-parallel-sharding-strategy no_shard; drop one of them",
        ),
        (
            "--data-parallel-sharding-strategy optim --zero-stage 2",
            "--zero-stage 2: contradicts --data-parallel-sharding-strategy optim; drop one",
        ),
        ("--use-torch-fsdp2 --zero-stage 2", "--zero-stage 2: contradicts --use-torch-fsdp2"),
        (
            "--data-parallel-sharding-strategy full",
            "--data-parallel-sharding-strategy full: choose from 0, 1, 2, 3",
        ),
        ("--use-distributed-optimizer 1", "--use-distributed-optimizer 1: it takes no value"),
        ("--use-distributed-optimizer --zero-stage x", "--zero-stage x: choose from 0, 1, 2, 3"),
    ],
)
def test_stages_that_contradict_are_one_fault(words, fault):
    with pytest.raises(ArgumentErrors) as caught:
        parse_arguments(words.split())
    found = [line for line in caught.value.faults if " is required" not in line]
    assert len(found) == 1 and found[0].startswith(fault), found


def test_a_file_of_settings_and_the_distributed_optimizer(tmp_path):
    """What the command line asks for at least goes over the file's stage, and leaves a higher
    one.
    """
    for stage, expected in ((0, 1), (1, 1), (3, 3)):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"distributed": {"zero_stage": stage}}))
        assert (
            parse_arguments(
                ["--config", str(path), "--use-distributed-optimizer"]
            ).config.distributed.zero_stage
            == expected
        )


def test_other_names_of_activation_offload():
    words = "--fine-grained-activation-offloading --activation-offload-fraction 0.5"
    training = parse_arguments(words.split()).config.training
    assert training.activation_offload and training.activation_offload_fraction == 0.5
    training = parse_arguments(["--checkpoint-in-cpu"]).config.training
    assert training.activation_offload and training.offload_modules == ("layer_input",)


@pytest.mark.parametrize(
    "words, fault",
    [
        ("--offload-modules moe_act", "recompute it with --recompute-modules moe_act"),
        ("--cpu-offloading-num-layers 2", "use --activation-offload --activation-offload-fraction"),
        ("--delta-offload-bytes-across-pp-ranks 4096", "the same share of its layers"),
    ],
)
def test_offload_that_is_not_ours_is_refused_with_what_to_give(words, fault):
    with pytest.raises(ArgumentErrors, match=fault):
        parse_arguments(words.split())


def test_other_names_of_precisions_and_offload():
    parsed = parse_arguments(
        "--bf16 --cpu-optimizer --megatron-fsdp-main-grads-dtype bf16 "
        "--megatron-fsdp-grad-comm-dtype bf16 "
        "--megatron-fsdp-main-params-dtype fp32 --use-torch-fsdp2 "
        "--torch-fsdp2-no-reshard-after-forward".split()
    ).config
    assert parsed.optimizer.optimizer_cpu_offload and parsed.optimizer.main_grads_dtype == "bf16"
    assert parsed.distributed.grad_reduce_in_bf16 and parsed.distributed.zero3_keep_gathered
    assert not parse_arguments(
        "--megatron-fsdp-grad-comm-dtype fp32".split()
    ).config.distributed.grad_reduce_in_bf16


@pytest.mark.parametrize("words, fused", [("linear", True), ("native", False), ("te", False)])
def test_other_names_of_the_fused_head(words, fused):
    parsed = parse_arguments(["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", words])
    assert parsed.config.model.fused_linear_cross_entropy == fused
    assert any("--cross-entropy-backend" in note for note in parsed.notes) == (words == "te")


def test_other_names_of_the_mlp_in_pieces():
    assert parse_arguments("--mlp-chunks-for-training 8".split()).config.model.tiled_mlp == 8
    asked = parse_arguments("--memory-centric-tiled-linear --tile-factor 4".split())
    (answer,) = asked.not_done
    assert answer.startswith("--memory-centric-tiled-linear, --tile-factor: ")
    assert "--tiled-mlp" in answer


def test_notes_change_nothing():
    noted = [
        flag
        for flag, row in compatibility.rows().items()
        if row.verdict in ("note", "not_done")
        and not row.is_conditional
        and flag not in options_by_flag()
    ]
    assert len(noted) > 400 and parse_arguments(noted).config == Config()


@pytest.mark.parametrize(
    "words, missing",
    [
        (
            "--profile-backward --profile-steps 4",
            ["--profile-backward, --profile-steps: --profile writes Chrome traces"],
        ),
        (
            "--log-timers-to-tensorboard",
            ["--log-timers-to-tensorboard: no timer is logged; give --timing-log-level 1"],
        ),
        ("--log-timers-to-tensorboard --timing-log-level 1", []),
        ("--timing-log-level 2", ["--timing-log-level 2: there are no finer timers"]),
        ("--cuda-graph-impl none", []),
        ("--cuda-graph-impl local", ["--cuda-graph-impl: no CUDA graph"]),
        ("--attention-backend flash", ["--attention-backend flash: with attention dropout or"]),
        ("--attention-backend flash --attention-dropout 0", []),
        (
            "--attention-backend flash --attention-dropout 0 --attn-logit-softcapping 50",
            ["--attention-backend flash: with"],
        ),
        (
            "--use-flash-attn --attention-backend plain --attention-dropout 0",
            ["--use-flash-attn: with attention dropout"],
        ),
        ("--use-flash-attn --attention-backend triton", []),
        (
            "--split-transformers --tile-factor 1",
            ["--split-transformers: it saves no memory here"],
        ),
        (
            "--kill-switch-path x --empty-unused-memory-level 1",
            ["--empty-unused-memory-level: torch", "--kill-switch-path: no file ends a run"],
        ),
        ("--empty-unused-memory-level 0", []),
    ],
)
def test_services_that_do_not_exist_are_not_notes(words, missing):
    parsed = parse_arguments(words.split())
    assert len(parsed.not_done) == len(missing), parsed.not_done
    assert all(any(line.startswith(text) for line in parsed.not_done) for text in missing)
    assert not any(note in line for note in parsed.notes for line in missing)


@pytest.mark.parametrize(
    "words, fault",
    [
        (
            "--rerun-mode validate_results",
            "--rerun-mode validate_results: no step is computed twice",
        ),
        (
            "--check-weight-hash-across-dp-replicas-interval 5",
            "--check-weight-hash-across-dp-replicas-interval 5: the weights of replicas",
        ),
        (
            "--inprocess-restart",
            "--inprocess-restart: a job that fails is started again by its launcher",
        ),
        (
            "--recompute-granularity selective --recompute-modules shared_experts",
            "--recompute-modules shared_experts: shared_experts is a part of what mlp recomputes",
        ),
    ],
)
def test_what_changes_the_result_or_its_safety_is_refused(words, fault):
    with pytest.raises(ArgumentErrors) as caught:
        parse_arguments(words.split())
    assert caught.value.faults[0].startswith(fault)


def test_earlier_names_of_recompute_are_mapped():
    training = parse_arguments(
        "--activations-checkpoint-method uniform --activations-checkpoint-num-layers 1".split()
    ).config.training
    assert (
        training.recompute_granularity,
        training.recompute_method,
        training.recompute_num_layers,
    ) == ("full", "uniform", 1)
    block = parse_arguments(
        "--activations-checkpoint-method block --checkpoint-num-layers 2 --partition-activations "
        "--hidden-size 64".split()
    ).config.training
    assert (block.recompute_granularity, block.recompute_method) == ("full", "block")
    assert block.recompute_num_layers == 2 and block.distribute_saved_activations
    selective = parse_arguments(["--recompute-activations"]).config.training
    assert selective.recompute_granularity == "selective" and selective.recompute_modules is None


def test_a_smaller_batch_is_never_promised():
    (note,) = parse_arguments(["--decrease-batch-size-if-needed"]).notes
    assert note.endswith(
        "the global batch is never made smaller: one that micro-batch-size x data-parallel "
        "ranks does not divide is refused"
    )
