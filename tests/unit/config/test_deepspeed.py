"""A DeepSpeed file is compared with the flags, key by key."""

from __future__ import annotations

import json
import os

import pytest

from megatron.config.arguments import parse_arguments
from megatron.config.deepspeed import compare_with_deepspeed
from megatron.config.errors import ArgumentErrors

FLAGS = "--micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --bf16".split()


def compare(tmp_path, content, flags=FLAGS):
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return compare_with_deepspeed(str(path), parse_arguments(flags).config)


@pytest.mark.parametrize(
    "content, note",
    [
        ({"train_batch_size": 16}, "equals --global-batch-size"),
        (
            {"gradient_accumulation_steps": 8},
            "equals --global-batch-size 16 with --micro-batch-size 2 on 1 data-parallel rank(s)",
        ),
        ({"gradient_accumulation_steps": 4}, "on 2 data-parallel rank(s)"),
        (
            {"communication_data_type": "fp32", "fp32_allreduce": True},
            "equals no --grad-reduce-in-bf16",
        ),
        ({"communication_data_type": None, "fp32_allreduce": False}, "off here too"),
        ({"gradient_clipping": 1}, "equals --clip-grad"),
        ({"bf16": {"enabled": True}}, "equals --bf16"),
        ({"fp16": {"enabled": False, "loss_scale_window": 7}}, "its section is not enabled"),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.999], "lr": 0.001}}},
            "equals --adam-beta1 and --adam-beta2",
        ),
        (
            {"zero_optimization": {"stage": 0, "reduce_bucket_size": 5e8}},
            "no such size or threshold is to be chosen",
        ),
        ({"zero_optimization": {"stage": 0}}, "equals --zero-stage"),
        (
            {"zero_optimization": {"overlap_comm": True}},
            "see --overlap-grad-reduce and --overlap-param-gather",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "none", "pin_memory": True}}},
            "equals no --optimizer-cpu-offload",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "none", "pin_memory": True}}},
            "equals no --param-cpu-offload",
        ),
        (
            {"zero_optimization": {"offload_param": {"buffer_count": 5}}},
            "how offloaded weights are moved is chosen here: see --param-cpu-offload",
        ),
        (
            {"zero_optimization": {"zero_hpz_partition_size": 1, "zero_quantized_weights": False}},
            "no such size or threshold",
        ),
        ({"zero_optimization": {"mics_shard_size": -1}}, "equals no --zero-shard-size"),
        (
            {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}},
            "checkpoints are independent of the ZeRO stage",
        ),
        ({"data_types": {"grad_accum_dtype": None}}, "--main-grads-dtype says what"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "equals --main-grads-dtype"),
        ({"train_batch_size": "auto"}, "follows the flags"),
        ({"wall_clock_breakdown": True}, "--timing-log-level 1"),
        ({"tensorboard": {"enabled": True, "output_path": "x"}}, "use --tensorboard-dir"),
        ({"some_new_feature": False}, "off here too"),
        ({"pipeline": {"stages": 1}}, "equals --pipeline-model-parallel-size"),
        (
            {
                "pipeline": {
                    "stages": "auto",
                    "partition": "best",
                    "activation_checkpoint_interval": 0,
                }
            },
            "--pipeline-model-parallel-layout says how",
        ),
    ],
)
def test_keys_that_agree(tmp_path, content, note):
    notes, faults = compare(tmp_path, content)
    assert faults == [] and any(note in line for line in notes), notes


@pytest.mark.parametrize(
    "content, fault",
    [
        (
            {"train_batch_size": 32},
            (
                "train_batch_size = 32: contradicts --global-batch-size 16; give "
                "--global-batch-size 32 or change the file"
            ),
        ),
        ({"gradient_accumulation_steps": 3}, "the --global-batch-size is a multiple of 6, not 16"),
        ({"communication_data_type": "bf16"}, "give --grad-reduce-in-bf16"),
        ({"communication_data_type": "fp16"}, "gradients are sent in fp32, or in bf16"),
        ({"communication_data_type": ["fp32"]}, "gradients are sent in fp32, or in bf16"),
        ({"fp16": {"enabled": True}}, "give --fp16"),
        ({"bf16": {"enabled": False}}, "contradicts --bf16; drop the flag or change the file"),
        (
            {"zero_optimization": {"stage": 2}},
            (
                "zero_optimization.stage = 2: contradicts --zero-stage 0; give --zero-stage 2 "
                "or change the file"
            ),
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "give --optimizer-cpu-offload",
        ),
        ({"zero_optimization": {"cpu_offload": True}}, "give --optimizer-cpu-offload"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "give --optimizer-nvme-offload DIR",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "disk"}}},
            "give --optimizer-nvme-offload disk",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "tape"}}},
            "no such place here; use cpu or nvme",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"ratio": 0.3}}},
            "contradicts --optimizer-offload-fraction 1.0; give --optimizer-offload-fraction 0.3",
        ),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "give --param-cpu-offload"),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "weights are kept on the device or in host memory, not in files; use cpu",
        ),
        ({"zero_optimization": {"cpu_offload_params": True}}, "give --param-cpu-offload"),
        (
            {"zero_optimization": {"zero_hpz_partition_size": 8}},
            "to gather inside a node give --zero-shard-size",
        ),
        ({"zero_optimization": {"mics_shard_size": 8}}, "give --zero-shard-size 8"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "never quantized on the wire"),
        (
            {"data_types": {"grad_accum_dtype": "bf16"}},
            "contradicts --main-grads-dtype fp32; give --main-grads-dtype bf16 or change the file",
        ),
        (
            {"data_types": {"grad_accum_dtype": "fp16"}},
            "gradients are accumulated in fp32, or in bf16 with --main-grads-dtype bf16",
        ),
        (
            {"pipeline": {"stages": 4}},
            (
                "pipeline.stages = 4: contradicts --pipeline-model-parallel-size 1; give "
                "--pipeline-model-parallel-size 4"
            ),
        ),
        ({"optimizer": {"type": "Lamb"}}, "contradicts --optimizer adam; give --optimizer lamb"),
        ({"curriculum_learning": {"enabled": True}}, "not supported; take it out"),
        (
            {"compression_training": {"weight_quantization": {"shared_parameters": 1}}},
            "not supported; take it out",
        ),
        ("{", "cannot be read"),
        ("[]", "expected an object, found a list"),
        ("[" * 20_000, "nested deeper than 64 levels"),
        ('{"a": ' * 100 + "1" + "}" * 100, "nested deeper than 64 levels"),
        (
            '{"zero_optimization": {"stage": 1}, "zero_optimization": {"stage": 0}}',
            "the key 'zero_optimization' occurs twice",
        ),
        ({"zero_optimization.stage": 0}, "a key with a dot is no section with a setting"),
        (
            {"zero_optimization": {"offload_optimizer.device": "cpu"}},
            "a key with a dot is no section",
        ),
        ({"zero_optimization.offload_optimizer.device": "cpu"}, "a key with a dot is no section"),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 99999}},
            "expected a power of two from 0 to 127",
        ),
        (
            {"fp16": {"enabled": True, "initial_scale_power": -99999}},
            "expected a power of two from 0 to 127",
        ),
        ({"fp16": {"enabled": True, "loss_scale": False}}, "expected a number"),
        ({"gradient_accumulation_steps": True}, "expected a number"),
        ({"gradient_accumulation_steps": 10**4000}, "expected a number"),
        ({"train_batch_size": True}, "expected a number"),
        ({"gradient_clipping": True}, "gradient_clipping = true: expected a number"),
        ({"bf16": {"enabled": 1}}, "bf16.enabled = 1: expected true or false"),
        ({"zero_optimization": {"stage": False}}, "expected a number"),
        ({"zero_optimization": {"zero_hpz_partition_size": True}}, "expected a number"),
        ({"zero_optimization": {"stage": {"a": 1}}}, "expected a single value, found an object"),
        ({"optimizer": {"type": 1}}, "expected text"),
        ({"optimizer": {"params": {"betas": 1}}}, "expected a list of two numbers"),
        ({"communication_data_type": "true"}, "gradients are sent in fp32, or in bf16"),
        ('{"train_batch_size": "\\ud800"}', "half of a surrogate pair"),
        ({f"key {number}": 1 for number in range(100)}, "and 80 more faults"),
    ],
)
def test_keys_that_do_not(tmp_path, content, fault):
    _, faults = compare(tmp_path, content)
    assert any(fault in line and "ds.json" in line for line in faults), faults


@pytest.mark.parametrize(
    "make, fault",
    [
        (lambda path: os.mkfifo(path), "is a named pipe (FIFO), not a regular file"),
        (lambda path: path.mkdir(), "is a folder, not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device, not a regular file"),
        (lambda path: path.write_bytes(b"\xff"), "not UTF-8 text: byte 0"),
        (lambda path: path.write_bytes(b" " * (2 << 20)), "has more than 1,048,576 bytes"),
        (lambda path: None, "No such file"),
    ],
)
def test_what_is_no_file_of_settings(tmp_path, make, fault):
    make(tmp_path / "ds.json")
    _, faults = compare_with_deepspeed(str(tmp_path / "ds.json"), parse_arguments(FLAGS).config)
    assert len(faults) == 1 and fault in faults[0] and "ds.json" in faults[0]


def test_values_in_other_units(tmp_path):
    flags = [*FLAGS[:-1], "--fp16", "--initial-loss-scale", "2048"]
    notes, faults = compare(
        tmp_path, {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 11}}, flags
    )
    assert faults == [] and len(notes) == 3
    _, faults = compare(tmp_path, {"fp16": {"enabled": True, "loss_scale": 128}}, flags)
    assert faults[0].endswith("give --loss-scale 128")


def test_a_dry_run_knows_its_data_parallel_ranks(tmp_path):
    flags = [*FLAGS, "--dry-run", "--world-size", "8", "--tensor-model-parallel-size", "2"]
    assert compare(tmp_path, {"gradient_accumulation_steps": 2}, flags)[1] == []
    assert (
        "the --global-batch-size is 8 on 4 data-parallel rank(s), not 16"
        in compare(tmp_path, {"gradient_accumulation_steps": 1}, flags)[1][0]
    )


def test_what_gradients_are_sent_in(tmp_path):
    flags = [*FLAGS, "--grad-reduce-in-bf16"]
    assert compare(tmp_path, {"communication_data_type": "bf16"}, flags)[1] == []
    for content in ({"communication_data_type": "fp32"}, {"fp32_allreduce": True}):
        assert (
            "contradicts --grad-reduce-in-bf16; drop the flag"
            in compare(tmp_path, content, flags)[1][0]
        )


def test_zero_and_its_offload(tmp_path):
    content = {
        "zero_optimization": {
            "stage": 2,
            "mics_shard_size": 4,
            "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.5},
        },
        "data_types": {"grad_accum_dtype": "bf16"},
        "communication_data_type": "bf16",
    }
    flags = [
        *FLAGS,
        *(
            (
                "--zero-stage 2 --zero-shard-size 4 --optimizer-cpu-offload "
                "--optimizer-offload-fraction 0.5 --main-grads-dtype bf16"
            ).split()
        ),
    ]
    notes, faults = compare(tmp_path, content, flags)
    assert faults == [] and len(notes) == 7 and sum(" equals " in note for note in notes) == 6, (
        notes
    )
    assert (
        "contradicts --main-grads-dtype bf16; give --main-grads-dtype fp32"
        in compare(tmp_path, {"communication_data_type": "fp32"}, flags)[1][0]
    )
    assert (
        compare(
            tmp_path,
            content
            | {
                "zero_optimization": {
                    "offload_optimizer": {"device": "cpu", "nvme_path": "x", "ratio": 0.5}
                }
            },
            flags,
        )[1]
        == []
    )
    assert (
        "contradicts --optimizer-cpu-offload; drop the flag"
        in compare(
            tmp_path, {"zero_optimization": {"offload_optimizer": {"device": "none"}}}, flags
        )[1][0]
    )


def test_weights_on_the_host(tmp_path):
    content = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu", "pin_memory": True},
        }
    }
    flags = [*FLAGS, *"--zero-stage 3 --optimizer-cpu-offload --param-cpu-offload".split()]
    notes, faults = compare(tmp_path, content, flags)
    assert faults == [] and any(
        'offload_param.device = "cpu": equals --param-cpu-offload' in note for note in notes
    )
    for off in ({"offload_param": {"device": "none"}}, {"cpu_offload_params": False}):
        assert (
            "contradicts --param-cpu-offload; drop the flag"
            in compare(tmp_path, {"zero_optimization": off}, flags)[1][0]
        )


def test_state_in_files(tmp_path):
    content, flags = (
        {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "disk"}}},
        [*FLAGS, "--optimizer-nvme-offload"],
    )
    notes, faults = compare(tmp_path, content, [*flags, "disk"])
    assert faults == [] and sum("equals --optimizer-nvme-offload" in note for note in notes) == 2
    (fault,) = compare(tmp_path, content, [*flags, "other"])[1]
    assert "contradicts --optimizer-nvme-offload other; give --optimizer-nvme-offload disk" in fault
    for device in ("cpu", "none"):
        (fault,) = compare(
            tmp_path,
            {"zero_optimization": {"offload_optimizer": {"device": device}}},
            [*flags, "disk"],
        )[1]
        assert "contradicts --optimizer-nvme-offload disk; drop the flag" in fault


def test_shares_of_saved_inputs(tmp_path):
    content = {"activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4}}
    ranks = [*FLAGS, "--tensor-model-parallel-size", "2", "--checkpoint-activations"]
    for flags in (FLAGS, ranks[:-1], [*ranks, "--sequence-parallel"]):
        notes, faults = compare(tmp_path, content, flags)
        assert faults == [] and "acts only where layers are recomputed" in notes[0]
    (fault,) = compare(tmp_path, content, ranks)[1]
    assert fault.endswith("give --distribute-saved-activations")
    notes, faults = compare(tmp_path, content, [*ranks, "--distribute-saved-activations"])
    assert faults == [] and "equals --distribute-saved-activations" in notes[0]
    assert "--recompute-num-layers says how many" in notes[1]


def test_layer_inputs_on_the_host(tmp_path):
    content = {"activation_checkpointing": {"cpu_checkpointing": True}}
    notes, faults = compare(tmp_path, content, FLAGS)
    assert faults == [] and "acts only where layers are recomputed" in notes[0]
    (fault,) = compare(tmp_path, content, [*FLAGS, "--checkpoint-activations"])[1]
    assert fault.endswith("give --activation-offload")
    flags = [*FLAGS, "--checkpoint-activations", "--activation-offload"]
    notes, faults = compare(tmp_path, content, flags)
    assert faults == [] and "equals --activation-offload" in notes[0]


def test_its_faults_come_with_the_others(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8}')
    with pytest.raises(ArgumentErrors) as caught:
        parse_arguments([*FLAGS, "--deepspeed_config", str(path), "--retro-workdir", "x"])
    assert {"--retro-workdir", "--deepspeed_config"} <= {
        fault.split()[0] for fault in caught.value.faults
    }
