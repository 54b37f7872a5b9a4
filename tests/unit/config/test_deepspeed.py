"""A DeepSpeed file is read with the flags, key by key: what a flag contradicts is refused, and what
no flag gives is taken.
"""

from __future__ import annotations

import json
import os

import pytest

from megatron.config.arguments import parse_arguments
from megatron.config.errors import ArgumentErrors
from megatron.config.groups import Config

FLAGS = "--micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --bf16".split()


def compare(tmp_path, content, flags=FLAGS):
    """The notes and the faults of a file's content."""
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    try:
        notes = parse_arguments([*flags, "--deepspeed_config", str(path)]).notes
    except ArgumentErrors as error:
        return [], [fault for fault in error.faults if fault.startswith("--deepspeed_config")]
    return [note for note in notes if note.startswith("DeepSpeed's")], []


def config_of(tmp_path, content, flags=()) -> Config:
    """The settings of flags and a file, which agree."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    return parse_arguments([*flags, "--deepspeed_config", str(path)]).config


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
        ({"communication_data_type": None}, "not set"),
        ({"bf16": {"enabled": True}}, "equals --bf16"),
        ({"fp16": {"enabled": False, "loss_scale_window": 7}}, "its section is not enabled"),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.999], "lr": 0.001}}},
            "equals --adam-beta1; equals --adam-beta2",
        ),
        (
            {"zero_optimization": {"stage": 0, "reduce_bucket_size": 5e8}},
            "no such size or threshold is to be chosen",
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
            {"zero_optimization": {"zero_hpz_partition_size": 1, "zero_quantized_weights": False}},
            "no such size or threshold",
        ),
        ({"zero_optimization": {"mics_shard_size": -1}}, "equals no --zero-shard-size"),
        (
            {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}},
            "checkpoints are independent of the ZeRO stage",
        ),
        ({"data_types": {"grad_accum_dtype": None}}, "not set"),
        ({"data_types": {"grad_accum_dtype": "torch.float32"}}, "equals --main-grads-dtype"),
        ({"fp16": {"loss_scale_window": 7}}, "its section is not enabled"),
        ({"fp16": {"enabled": "auto", "initial_scale_power": 7}}, "its section is not enabled"),
        ({"curriculum_learning": {"enabled": False, "schedule_type": 1}}, "is not enabled"),
        ({"monitor_config": {"enabled": True, "tag": "x"}}, "always written"),
        ({"checkpoint": {"load_universal": True}}, "independent of the layout"),
        ({"optimizer": {"params": {"max_grad_norm": 1.0}}}, "equals --clip-grad"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "--lr-decay"),
        ({"train_batch_size": "auto"}, "follows the flags"),
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
            "--pipeline-model-parallel-layout sets how",
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
        ({"communication_data_type": "fp16"}, "gradients are sent in fp32, or in bf16"),
        ({"communication_data_type": ["fp32"]}, "gradients are sent in fp32, or in bf16"),
        ({"bf16": {"enabled": False}}, "contradicts --bf16; remove the flag or change the file"),
        ({"fp16": {"enabled": True}}, "contradicts --bf16"),
        ({"zero_optimization": {"stage": 4}}, "--zero-stage: choose from 0, 1, 2, 3"),
        ({"gradient_clipping": -1}, "--clip-grad must be 0 or more"),
        ({"train_batch_size": 2.5}, "--global-batch-size: expected a whole number"),
        ({"optimizer": {"params": {"adam_w_mode": False}}}, "always decoupled"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "kept in fp32"),
        ({"gradient_allreduce_op": "sum"}, "averaged over the tokens"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "give --lr-decay-style constant"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "give --optimizer-nvme-offload DIR",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "tape"}}},
            "no such place here; use cpu or nvme",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "weights are kept on the device or in host memory, not in files; use cpu",
        ),
        (
            {"zero_optimization": {"zero_hpz_partition_size": 8}},
            "to gather inside a node give --zero-shard-size",
        ),
        (
            {"data_types": {"grad_accum_dtype": "fp16"}},
            "gradients are accumulated in fp32, or in bf16 with --main-grads-dtype bf16",
        ),
        ({"optimizer": {"type": "Lamb"}}, "--optimizer: choose from adam, sgd"),
        ({"curriculum_learning": {"enabled": True}}, "a sequence length that grows is not supp"),
        (
            {"compression_training": {"weight_quantization": {"shared_parameters": 1}}},
            "compression_training: compression is not supported; take the section out",
        ),
        ("{", "cannot be read"),
        ("[]", "expected an object, found a list"),
        ('{"a": ' * 100 + "1" + "}" * 100, "nested deeper than 64 levels"),
        (
            '{"zero_optimization": {"stage": 1}, "zero_optimization": {"stage": 0}}',
            "the key 'zero_optimization' occurs twice",
        ),
        ({"zero_optimization.stage": 0}, "a key with a dot is no section with a setting"),
        ({"zero_optimization.offload_optimizer.device": "cpu"}, "a key with a dot is no section"),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 99999}},
            "expected a power of two from 0 to 127",
        ),
        ({"gradient_accumulation_steps": 10**4000}, "expected a number"),
        ({"gradient_clipping": True}, "gradient_clipping = true: expected a number"),
        ({"bf16": {"enabled": 1}}, "bf16.enabled = 1: expected true or false"),
        ({"zero_optimization": {"zero_hpz_partition_size": True}}, "expected a number"),
        ({"zero_optimization": {"stage": {"a": 1}}}, "expected a single value, found an object"),
        ({"optimizer": {"type": 1}}, "expected text"),
        ({"optimizer": {"params": {"betas": 1}}}, "expected a list of two numbers"),
        ('{"train_batch_size": "\\ud800"}', "half of a surrogate pair"),
        ({f"key {number}": 1 for number in range(100)}, "and 80 more faults"),
    ],
)
def test_keys_that_do_not(tmp_path, content, fault):
    _, faults = compare(tmp_path, content)
    assert any(fault in line and "ds.json" in line for line in faults), faults


@pytest.mark.parametrize(
    "content, flags, group, expected",
    [
        ({"train_batch_size": 64}, "", "training", {"global_batch_size": 64}),
        (
            {"gradient_accumulation_steps": 3},
            "--micro-batch-size 2 --dry-run --world-size 4",
            "training",
            {"global_batch_size": 24},
        ),
        ({"bf16": {"enabled": True}}, "", "precision", {"bf16": True}),
        (
            {
                "fp16": {
                    "enabled": True,
                    "loss_scale": 0,
                    "loss_scale_window": 500,
                    "hysteresis": 3,
                    "min_loss_scale": 2,
                    "initial_scale_power": 11,
                }
            },
            "--fp16",
            "precision",
            {
                "loss_scale": None,
                "loss_scale_window": 500,
                "hysteresis": 3,
                "min_loss_scale": 2.0,
                "initial_loss_scale": 2048.0,
            },
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": 128, "initial_scale_power": 11}},
            "",
            "precision",
            {"fp16": True, "loss_scale": 128.0, "initial_loss_scale": 2.0**32},
        ),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 15}},
            "--fp16 --loss-scale 15",
            "precision",
            {"loss_scale": 15.0, "initial_loss_scale": 2.0**32},
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.99], "lr": 1e-5}}},
            "--adam-beta2 0.99",
            "optimizer",
            {"optimizer": "adam", "adam_beta1": 0.8, "adam_beta2": 0.99, "lr": 1e-5},
        ),
        ({"communication_data_type": "bfloat16"}, "", "distributed", {"grad_reduce_in_bf16": True}),
        (
            {"zero_optimization": {"stage": 2, "mics_shard_size": 8}},
            "",
            "distributed",
            {"zero_stage": 2, "zero_shard_size": 8},
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
            "",
            "optimizer",
            {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.3},
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "d"}}},
            "",
            "optimizer",
            {"optimizer_nvme_offload": "d"},
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            "",
            "optimizer",
            {"param_cpu_offload": True},
        ),
        (
            {"data_types": {"grad_accum_dtype": "bfloat16"}},
            "--bf16",
            "optimizer",
            {"main_grads_dtype": "bf16"},
        ),
    ],
)
def test_what_no_flag_gives_is_taken(tmp_path, content, flags, group, expected):
    """A value of a file wins over our default, and is as if it were given."""
    config = getattr(config_of(tmp_path, content, flags.split()), group)
    assert {name: getattr(config, name) for name in expected} == expected


WARMUP = {"warmup_min_lr": 1e-6, "warmup_max_lr": 1e-4, "warmup_num_steps": 500}


@pytest.mark.parametrize(
    "scheduler, flags, expected",
    [
        (
            {"type": "WarmupLR", "params": WARMUP},
            "--train-iters 900",
            {
                "lr_decay_style": "constant",
                "lr_warmup_iters": 500,
                "lr": 1e-4,
                "lr_warmup_init": 1e-6,
            },
        ),
        (
            {"type": "WarmupDecayLR", "params": {**WARMUP, "total_num_steps": 800}},
            "--train-samples 9000 --global-batch-size 8",
            {"lr_decay_style": "linear", "lr_warmup_samples": 4000, "lr_decay_samples": 6400},
        ),
        (
            {
                "type": "WarmupCosineLR",
                "params": {
                    "total_num_steps": 100,
                    "warmup_num_steps": 10,
                    "cos_min_ratio": 0.125,
                    "warmup_type": "linear",
                },
            },
            "--train-iters 100 --lr 0.5",
            {"lr_decay_style": "cosine", "lr_decay_iters": 100, "min_lr": 0.0625},
        ),
        (
            {"type": "WarmupLR", "params": dict.fromkeys(WARMUP, "auto")},
            "--train-iters 900 --lr-warmup-iters 7",
            {"lr_decay_style": "constant", "lr_warmup_iters": 7},
        ),
    ],
)
def test_a_scheduler_is_taken(tmp_path, scheduler, flags, expected):
    config = config_of(tmp_path, {"scheduler": scheduler}, flags.split()).optimizer
    assert {name: getattr(config, name) for name in expected} == expected


def test_a_logarithmic_warm_up_is_refused_with_flags_that_can_be_typed(tmp_path):
    content = {"scheduler": {"type": "WarmupLR", "params": {**WARMUP, "warmup_type": "log"}}}
    (fault,) = compare(tmp_path, content, ["--train-iters", "900"])[1]
    advice = fault.partition(" give ")[2].split()
    assert "--lr-warmup-iters 500" in fault and parse_arguments(advice).config.optimizer.lr == 1e-4


@pytest.mark.parametrize(
    "content, flags",
    [
        ({"optimizer": {"params": {"betas": [0.8, 0.99]}}}, "--adam-beta1 0.9 --adam-beta2 0.999"),
        ({"fp16": {"enabled": True, "loss_scale_window": 500}}, "--fp16 --loss-scale-window 1000"),
        ({"fp16": {"enabled": True, "initial_scale_power": 5}}, "--fp16 --initial-loss-scale 2"),
        ({"zero_optimization": {"stage": 2}}, "--zero-stage 1"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "--no-param-cpu-offload"),
        ({"train_batch_size": 8}, "--global-batch-size 16"),
        ({"gradient_clipping": 0.5}, "--clip-grad 1"),
        ({"communication_data_type": "bf16"}, "--no-grad-reduce-in-bf16"),
        ({"scheduler": {"type": "WarmupLR", "params": WARMUP}}, "--train-iters 9 --lr 1e-3"),
    ],
)
def test_advice_that_is_followed_ends_the_fault(tmp_path, content, flags):
    """Each advice is a command line, and with it the file contradicts nothing."""
    (fault,) = compare(tmp_path, content, flags.split())[1]
    advice = []
    for part in fault.split("; "):
        if part.startswith("give "):
            advice += part.removeprefix("give ").removesuffix(" or change the file").split()
    assert advice and compare(tmp_path, content, [*flags.split(), *advice])[1] == []


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
    with pytest.raises(ArgumentErrors) as caught:
        parse_arguments([*FLAGS, "--deepspeed_config", str(tmp_path / "ds.json")])
    faults = [fault for fault in caught.value.faults if fault.startswith("--deepspeed_config")]
    assert len(faults) == 1 and fault in faults[0] and "ds.json" in faults[0]


def test_values_in_other_units(tmp_path):
    flags = [*FLAGS[:-1], "--fp16", "--initial-loss-scale", "2048"]
    notes, faults = compare(
        tmp_path, {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 11}}, flags
    )
    assert faults == [] and len(notes) == 3
    static = [*flags, "--loss-scale", "64"]
    _, faults = compare(tmp_path, {"fp16": {"enabled": True, "loss_scale": 128}}, static)
    assert faults[0].endswith("give --loss-scale 128 or change the file")


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
            "contradicts --grad-reduce-in-bf16; remove the flag"
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
        "contradicts --optimizer-cpu-offload; remove the flag"
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
            "contradicts --param-cpu-offload; remove the flag"
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
        assert faults == [] and "has no effect unless layers are recomputed" in notes[0]
    notes, _ = compare(tmp_path, content, ranks)
    assert notes[0].endswith("taken, as no flag sets it: --distribute-saved-activations")
    notes, faults = compare(tmp_path, content, [*ranks, "--distribute-saved-activations"])
    assert faults == [] and "equals --distribute-saved-activations" in notes[0]
    assert "--recompute-num-layers sets how many" in notes[1]


def test_layer_inputs_on_the_host(tmp_path):
    content = {"activation_checkpointing": {"cpu_checkpointing": True}}
    notes, faults = compare(tmp_path, content, FLAGS)
    assert faults == [] and "has no effect unless layers are recomputed" in notes[0]
    notes, _ = compare(tmp_path, content, [*FLAGS, "--checkpoint-activations"])
    assert notes[0].endswith("taken, as no flag sets it: --activation-offload")
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
