"""A DeepSpeed file is read with the flags, key by key: what a flag contradicts is refused, and what
no flag gives is taken.
"""

from __future__ import annotations

import json

import pytest
from config_lines import check_fields, rows

from megatron.config.arguments import Parsed, parse_arguments
from megatron.config.errors import ArgumentErrors

FLAGS = "--micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --bf16"


def read(tmp_path, content, flags: str = FLAGS) -> tuple[Parsed | None, list[str]]:
    """What the flags and a file's content give, and the faults of the file."""
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    try:
        return parse_arguments([*flags.split(), "--deepspeed_config", str(path)]), []
    except ArgumentErrors as error:
        return None, [each for each in error.faults if each.startswith("--deepspeed_config")]


def nested(settings: str) -> dict:
    """The content that `section.key=JSON ...` is."""
    content: dict = {}
    for each in settings.split():
        key, _, value = each.partition("=")
        *sections, name = key.split(".")
        inner = content
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = json.loads(value)
    return content


# Settings of a file and, after |, flags (@: FLAGS, which are the default). A text is a part of one
# line that the file gives; a row without a fault has none.
ROWS = """
# keys that agree with the flags, and keys that change nothing
train_batch_size=16 communication_data_type=null fp32_allreduce=false bf16.enabled=true \
optimizer.type="AdamW" optimizer.params.betas=[0.9,0.999] optimizer.params.max_grad_norm=1.0
    note train_batch_size = 16: equals --global-batch-size
    note fp32_allreduce = false: off here too
    note communication_data_type = null: not set
    note enabled = true: equals --bf16
    note betas[1] = 0.999: equals --adam-beta2
    note equals --clip-grad
communication_data_type="fp32" fp32_allreduce=true fp16.loss_scale_window=7
    note equals no --grad-reduce-in-bf16
    note its section is not enabled
fp16.enabled="auto" fp16.initial_scale_power=7 train_batch_size="auto" \
checkpoint.load_universal=true
    note its section is not enabled
    note train_batch_size = "auto": follows the flags
    note independent of the layout
zero_optimization={"stage":0,"reduce_bucket_size":5e8,"zero_hpz_partition_size":1} \
zero_optimization.offload_optimizer={"device":"none","pin_memory":true} \
zero_optimization.offload_param={"device":"none","pin_memory":true} \
data_types.grad_accum_dtype="torch.float32" scheduler={"type":"WarmupLR","params":{}}
    note no such size or threshold is to be chosen
    note equals no --optimizer-cpu-offload
    note equals no --param-cpu-offload
    note equals --main-grads-dtype
    note --lr-decay

# contradictions, and what has no equal
train_batch_size=32 communication_data_type="fp16" bf16.enabled=false zero_optimization.stage=4 \
zero_optimization.offload_optimizer.device="nvme" optimizer.type="Lamb" \
data_types.grad_accum_dtype="fp16" scheduler={"type":"OneCycle","params":{}}
    fault = 32: contradicts --global-batch-size 16; give --global-batch-size 32 or change the file
    fault gradients are sent in fp32, or in bf16
    fault contradicts --bf16; remove the flag or change the file
    fault --zero-stage: choose from 0, 1, 2, 3
    fault give --lr-decay-style constant
    fault give --optimizer-nvme-offload DIR
    fault gradients are accumulated in fp32, or in bf16 with --main-grads-dtype bf16
    fault --optimizer: choose from adam, sgd
gradient_accumulation_steps=3 optimizer.params.adam_w_mode=false \
zero_optimization.zero_hpz_partition_size=8 \
compression_training.weight_quantization.shared_parameters=1
    fault give --global-batch-size 12 or change the file
    fault always decoupled
    fault to gather inside a node give --zero-shard-size
    fault compression_training: compression is not supported; take the section out
scheduler="WarmupLR" gradient_allreduce_op={"a":"mean"}
    fault scheduler = "WarmupLR": not supported
    fault gradients are averaged over the tokens of the global batch; set it to "mean"

# values of a wrong kind
fp16.enabled=true fp16.initial_scale_power=99999 bf16.enabled=1 zero_optimization.stage={"a":1} \
optimizer.type=1 optimizer.params.betas=1
    fault --initial-loss-scale must be from 2**-126 to 2**127
    fault bf16.enabled = 1: --bf16: expected true or false
    fault --zero-stage: expected a number
    fault --optimizer: expected text
    fault expected a list of two numbers
fp16={"enabled":true,"initial_scale_power":"16"} | --fp16
    fault initial_scale_power = "16": expected a number
zero_optimization.stage=7 a={"b.c":1}
    fault a.b.c: a key with a dot is no section
    fault --zero-stage: choose from 0, 1, 2, 3

# what is off, however it is written
zero_optimization={"zeropp_loco_param":{},"zero_quantized_weights":0} \
optimizer={"params":{"amsgrad":0,"adam_w_mode":1,"bias_correction":true}}
    note zeropp_loco_param = {}: layers are gathered
    note adam_w_mode = 1: AdamW
zero_optimization.zero_quantized_weights=1
    fault never quantized on the wire

# values that no flag gives
train_batch_size=64 | --bf16
    global_batch_size = 64
gradient_accumulation_steps=3 | --micro-batch-size 2 --dry-run --world-size 4
    global_batch_size = 24
fp16={"enabled":true,"loss_scale":0,"loss_scale_window":500,"hysteresis":3} | --fp16
    loss_scale = None
    loss_scale_window = 500
    hysteresis = 3
fp16={"enabled":true,"loss_scale":128,"initial_scale_power":11} | --lr 1
    fp16 = True
    loss_scale = 128.0
    initial_loss_scale = 4294967296.0
optimizer={"type":"AdamW","params":{"betas":[0.8,0.99],"lr":1e-5}} | --adam-beta2 0.99
    optimizer = adam
    adam_beta1 = 0.8
    adam_beta2 = 0.99
    lr = 1e-05
zero_optimization={"stage":2,"mics_shard_size":8} | --lr 1
    zero_stage = 2
    zero_shard_size = 8
zero_optimization.offload_optimizer={"device":"nvme","nvme_path":"d"} | --lr 1
    optimizer_nvme_offload = d

# schedules
scheduler={"type":"WarmupLR","params":{"warmup_min_lr":1e-6,"warmup_max_lr":1e-4}} | --train-iters 9
    lr_decay_style = constant
    lr_warmup_iters = 1000
    lr = 0.0001
    lr_warmup_init = 1e-06
    min_lr = 0.0
    note the warm-up is linear, where DeepSpeed's default is logarithmic
scheduler={"type":"WarmupDecayLR","params":{"warmup_num_steps":500,"total_num_steps":800}} | \
--train-samples 9000 --global-batch-size 8
    lr_decay_style = linear
    lr_warmup_samples = 4000
    lr_decay_samples = 6400
scheduler={"type":"WarmupDecayLR","params":{"warmup_min_lr":1e-6}} | --train-iters 9000
    note --lr-warmup-init 1e-06; taken, as no flag sets it: --min-lr 1e-06
    lr_warmup_init = 1e-06
    min_lr = 1e-06
scheduler={"type":"WarmupDecayLR","params":{"total_num_steps":800}} | --train-samples 9000
    fault the run is measured in --train-samples; give --train-iters, or take the section out
scheduler={"type":"WarmupCosineLR","params":{"cos_min_ratio":0.125,"warmup_type":"linear"}} | \
--train-iters 100 --lr 0.5
    lr_decay_style = cosine
    min_lr = 0.0625
scheduler={"type":"WarmupCosineLR","params":{"cos_min_ratio":0.125}} | --train-iters 100
    note cos_min_ratio = 0.125: a share of --lr, which is not given
scheduler={"type":"WarmupLR","params":{"warmup_max_lr":1e-4}} | --train-iters 9 \
--lr-warmup-init 1e-6
    fault warmup_min_lr = 0: contradicts --lr-warmup-init 1e-06; give --lr-warmup-init 0
scheduler={"type":"WarmupDecayLR","params":{"warmup_max_lr":1e-4}} | --train-iters 9 --min-lr 1e-5
    fault warmup_min_lr = 0: contradicts --min-lr 1e-05; give --min-lr 0
scheduler={"type":"WarmupCosineLR","params":{}} | --train-iters 9 --lr 1e-4 --min-lr 1e-5
    fault cos_min_ratio = 0.0001: contradicts --min-lr 1e-05; give --min-lr 1e-08
scheduler={"type":"WarmupLR","params":{"warmup_num_steps":"x"}}
    fault warmup_num_steps = "x": expected a number
scheduler={"type":"WarmupLR","params":{"warmup_type":"log"}} | --train-iters 9
    fault a warm-up that is not linear is not supported

# keys that are missing, and have another default in DeepSpeed
scheduler.type="WarmupLR" optimizer={"type":"Adam","params":{"lr":1e-4}} | --train-iters 9
    lr = 0.001
    note DeepSpeed's gradient_clipping is not set: DeepSpeed's default is 0, which clips nothing
    note DeepSpeed's optimizer.params.weight_decay is not set: DeepSpeed's default is 0
scheduler.type="WarmupLR" | --train-iters 9 --lr 1e-4
    fault warmup_max_lr = 0.001: contradicts --lr 0.0001; give --lr 0.001 or change the file
scheduler.type="WarmupCosineLR" | --train-iters 9 --lr 1e-4
    lr = 0.0001

# an old form of a section
zero_optimization=true
    fault zero_optimization = true: write {"stage": 1}

# what depends on other flags
fp16={"enabled":true,"loss_scale":0,"initial_scale_power":11} | --fp16 --initial-loss-scale 2048
    note equals no --loss-scale
    note equals --initial-loss-scale
gradient_accumulation_steps=2 | @ --dry-run --world-size 8 --tensor-model-parallel-size 2
    note = 2: equals --global-batch-size: 2 x 2 on 4 data-parallel rank(s)
fp32_allreduce=true | @ --grad-reduce-in-bf16
    fault contradicts --grad-reduce-in-bf16; remove the flag
communication_data_type="bf16" data_types.grad_accum_dtype="bf16" | @ --main-grads-dtype bf16
    note communication_data_type = "bf16": equals --main-grads-dtype
    note data_types.grad_accum_dtype = "bf16": equals --main-grads-dtype
zero_optimization.offload_optimizer={"device":"cpu","ratio":0.5,"nvme_path":"x"} | \
@ --optimizer-cpu-offload --optimizer-offload-fraction 0.5
    note device = "cpu": equals --optimizer-cpu-offload
    note equals --optimizer-offload-fraction
zero_optimization.offload_optimizer.device="cpu" | @ --optimizer-nvme-offload d
    fault contradicts --optimizer-nvme-offload d; drop the flag
activation_checkpointing.partition_activations=true | @ --tensor-model-parallel-size 2 \
--checkpoint-activations --sequence-parallel
    note has no effect without copies on tensor-parallel ranks (no --sequence-parallel)
activation_checkpointing.partition_activations=true | @ --tensor-model-parallel-size 2 \
--checkpoint-activations
    note taken, as no flag sets it: --distribute-saved-activations
"""


@pytest.mark.parametrize("line, wanted", rows(ROWS, "note", "fault"))
def test_keys(tmp_path, line, wanted):
    settings, _, flags = line.partition(" | ")
    parsed, faults = read(tmp_path, nested(settings), flags.replace("@", FLAGS) or FLAGS)
    for text in wanted.get("fault", []):
        assert any(text in each and "ds.json" in each for each in faults), faults
    if "fault" not in wanted:
        assert faults == []
        notes = [note for note in parsed.notes if note.startswith("DeepSpeed's")]
        for text in wanted.get("note", []):
            assert any(text in note for note in notes), notes
        check_fields(parsed.config, wanted.get("", []))


@pytest.mark.parametrize(
    "content, fault",
    [
        ("{", "cannot be read"),
        ({"zero_optimization.stage": 0}, "a key with a dot is no section"),
        ({"gradient_accumulation_steps": 10**4000}, "a number"),
        ({f"key {number}": 1 for number in range(100)}, "key 99"),
    ],
)
def test_contents_that_are_no_settings(tmp_path, content, fault):
    _, faults = read(tmp_path, content)
    assert any(fault in each and "ds.json" in each for each in faults), faults


@pytest.mark.parametrize(
    "settings, flags",
    [
        ("optimizer.params.betas=[0.8,0.999]", "--adam-beta1 0.9"),
        ('communication_data_type="bf16"', "--no-grad-reduce-in-bf16"),
        ('scheduler={"type":"WarmupLR","params":{"warmup_max_lr":1e-4}}', "--lr 1e-3"),
    ],
)
def test_advice_that_is_followed_ends_the_fault(tmp_path, settings, flags):
    """Each advice is a command line, and with it the file contradicts nothing."""
    (fault,) = read(tmp_path, nested(settings), flags)[1]
    advice = [
        part.removeprefix("give ").removesuffix(" or change the file")
        for part in fault.split("; ")
        if part.startswith("give ")
    ]
    assert advice and read(tmp_path, nested(settings), " ".join([flags, *advice]))[1] == []
