"""The table of foreign flags: well-formed and complete, and its answers; a typo is refused with the
flag that was meant.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from config_lines import check_fields, faults_of, rows

from megatron.config import compatibility
from megatron.config.arguments import parse_arguments
from megatron.config.compatibility import by_value, data, recorded_names, table
from megatron.config.errors import ArgumentErrors
from megatron.config.groups import Config
from megatron.config.help import COMMANDS
from megatron.config.options import FIELDS, key, options_by_flag

ROOT = Path(__file__).resolve().parents[3]
OURS = {*options_by_flag(), *map(key, COMMANDS)}

VALUE_OF = {
    "--megatron-fsdp-main-grads-dtype": "bf16",
    "--megatron-fsdp-grad-comm-dtype": "bf16",
    "--cross-entropy-fusion-impl": "linear",
    "--activations-checkpoint-method": "uniform",
}  # no number


def test_the_table_is_consistent():
    # no name is there twice
    assert len({flag for row in table() for flag in row.flags}) == sum(
        len(row.flags) for row in table()
    )
    for row in table():
        assert row.flags and row.text
        assert (row.values != ()) == (row.verdict == "only") or row.verdict == "not_done"
        assert bool(row.when) == (row.otherwise != "")
        assert (row.choices is not None) == (row.verdict == "choice")
        for rule in " ".join(row.when).split():
            option, values = FIELDS[rule.partition("=")[0]], rule.partition("=")[2].split(",")
            if "None" in values:
                assert option.optional
            assert all(str(option.convert(value)) == value for value in values if value != "None")
        for flag in row.flags:
            assert flag.startswith("--") and flag.rstrip("*").replace("*", "") == flag.rstrip("*")
            assert flag not in options_by_flag(), f"{flag} is a field: its row would never act"
        for value in row.choices or {}:
            parse_arguments([row.flags[0], *([value] if value else [])])
        if row.verdict != "equals" or row.text.startswith("--config"):
            continue  # a file: see test_settings_files.py
        parse_arguments(
            [row.flags[0], *([VALUE_OF.get(row.flags[0], "1")] if "$" in row.text else [])]
        )
    fields = {option.names[0]: option for option in FIELDS.values()}
    for (flag, theirs), ours in by_value("values").items():
        assert fields[flag].parse([ours]) != theirs and theirs not in fields[flag].choices
    assert all(pair in by_value("values") for pair in by_value("value_notes"))
    assert not set(by_value("values")) & set(by_value("refused_values"))
    for flag, theirs in by_value("refused_values"):
        assert theirs not in fields[flag].choices


def test_differences_and_deepspeed_keys_name_our_flags():
    differences = data()["differences"]
    named = " ".join([differences["not_in_megatron_lm"], *differences["notes"]]).split()
    assert len(set(named)) == len(named) > 80
    assert all(name in options_by_flag() for name in named)
    assert all(name in options_by_flag() for name in data()["deepspeed"]["same"].values())


def test_a_longer_family_or_an_exact_name_wins():
    assert compatibility.rows()["--moe-latent-size"].verdict == "note"
    assert compatibility.rows()["--moe-use-upcycling"].verdict == "refused"


# Command lines of other programs: what each line below gives, one of `fault TEXT`, `note TEXT`,
# `missing TEXT` (a service that does not exist here) and `field = value`. A text is the beginning
# of a line; faults and missing services are complete, and notes where one is listed.
ANSWERS = """
--zero-stage 4
    fault --zero-stage 4: choose from 0, 1, 2, 3
--accumulate-allreduce-grads-in-fp32
    note --accumulate-allreduce-grads-in-fp32: gradients are accumulated and sent in fp32 without
--accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16
    fault --accumulate-allreduce-grads-in-fp32: contradicts --grad-reduce
--ddp-reduce-scatter-with-fp32-accumulation
    note --ddp-reduce-scatter-with-fp32-accumulation: gradients are summed over ranks in fp32
--ddp-reduce-scatter-with-fp32-accumulation --grad-reduce-in-bf16 --distributed-backend gloo
    note --ddp-reduce-scatter-with-fp32-accumulation: gradients are summed over ranks in fp32
--ddp-reduce-scatter-with-fp32-accumulation --grad-reduce-in-bf16
    fault --ddp-reduce-scatter-with-fp32-accumulation: NCCL adds in the precision
--ddp-reduce-scatter-with-fp32-accumulation --bf16 --main-grads-dtype bf16
    fault --ddp-reduce-scatter-with-fp32-accumulation: NCCL adds in the precision
--exp-avg-dtype fp8 --exp-avg-sq-dtype fp16
    fault --exp-avg-dtype fp8: moments are kept in fp32 or bf16; give --exp-avg-dtype bf16
    fault --exp-avg-sq-dtype fp16: moments are kept
--tp-comm-overlap --no-async-tensor-model-parallel-allreduce
    note --tp-comm-overlap, --no-async-tensor-model-parallel-allreduce: the collectives of tensor
--moe-loss-coeff 0.01
    note --moe-loss-coeff: has no effect without --num-experts
--attention-head-type multihead --use-torch-compile=0
    note
--attention-head-type grouped
    fault --attention-head-type grouped: give --num-query-groups
--no-position-embedding
    fault --no-position-embedding: use --position-embedding-type rope or none
--use-flash-attn --use-flash-attn --num-workers 4 --attention-dropout 0
    note --use-flash-attn: --attention-backend auto
    note --num-workers: data order

# ZeRO
--zero-stage 2 --use-distributed-optimizer
    zero_stage = 2
--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward
    zero_stage = 3
    zero3_keep_gathered = True
--zero-stage 0 --use-distributed-optimizer
    fault --use-distributed-optimizer: contradicts --zero-stage 0; drop one of them
--data-parallel-sharding-strategy optim --zero-stage 2
    fault --zero-stage 2: contradicts --data-parallel-sharding-strategy optim; drop one
--use-distributed-optimizer 1
    fault --use-distributed-optimizer 1: it takes no value

# precisions, offload, pieces
--bf16 --megatron-fsdp-main-grads-dtype bf16 --megatron-fsdp-grad-comm-dtype bf16 --cpu-optimizer
    main_grads_dtype = bf16
    grad_reduce_in_bf16 = True
    optimizer_cpu_offload = True
--megatron-fsdp-grad-comm-dtype fp32 --megatron-fsdp-main-params-dtype fp32
    grad_reduce_in_bf16 = False
--offload-modules moe_act
    fault --offload-modules moe_act: of experts nothing is offloaded; recompute it with
--cross-entropy-fusion-impl te
    fused_linear_cross_entropy = False
    note --cross-entropy-fusion-impl te: --cross-entropy-backend chooses the kernel

# recomputation
--activations-checkpoint-method block --checkpoint-num-layers 2 --partition-activations
    recompute_granularity = full
    recompute_method = block
    recompute_num_layers = 2
    distribute_saved_activations = True

# services that do not exist here
--profile-backward --profile-steps 4
    missing --profile-backward, --profile-steps: --profile writes Chrome traces
--log-timers-to-tensorboard
    missing --log-timers-to-tensorboard: no timer is logged; give --timing-log-level 1
--attention-backend flash
    note --attention-backend flash is auto here
    attention_backend = auto

# values that are what happens here anyway, and others
--tokenizer-type TikTokenizer --tiktoken-pattern v2 --tiktoken-num-special-tokens 1000
    note
--tokenizer-type TikTokenizer --tiktoken-pattern v1 --tiktoken-special-tokens <x>
    fault --tokenizer-type TikTokenizer: set --tokenizer-model
    fault --tiktoken-pattern v1: the TikTokenizer splits text as v2 does
    fault --tiktoken-special-tokens <x>: special tokens of the TikTokenizer cannot be chosen
--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir d --non-persistent-save-interval 9
    note
    local_checkpoint_dir = d
    local_save_interval = 9
--non-persistent-local-ckpt-dir d --replication --replication-jump 8
    local_redundancy = partner
    note --replication-jump: --local-redundancy chooses
--non-persistent-ckpt-type global
    fault --non-persistent-ckpt-type global: frequent checkpoints are kept on each node
--moe-token-dispatcher-type allgather
    note --moe-token-dispatcher-type: tokens go to their experts and back by an all-to-all

# what changes the result or its safety
--no-load-lr-state
    fault --no-load-lr-state: use --override-opt-param-scheduler
--use-checkpoint-args --no-use-tokenizer-model-from-checkpoint-args
    use_checkpoint_args = True
    note --no-use-tokenizer-model-from-checkpoint-args: a --tokenizer-model that is given
--inprocess-restart
    fault --inprocess-restart: a job that fails is started again by its launcher
"""


def begin_alike(found: list[str], wanted: list[str]) -> bool:
    return len(found) == len(wanted) and all(
        any(line.startswith(text) for line in found) for text in wanted
    )


@pytest.mark.parametrize("words, wanted", rows(ANSWERS, "fault", "note", "missing"))
def test_answers(words, wanted):
    try:
        parsed = parse_arguments(words.split())
    except ArgumentErrors as error:
        found = [fault for fault in error.faults if " is required" not in fault]
        assert begin_alike(found, wanted["fault"]), found
        return
    assert "fault" not in wanted and not set(parsed.notes) & set(parsed.not_done)
    assert begin_alike(parsed.not_done, wanted.get("missing", [])), parsed.not_done
    if "note" in wanted:
        assert begin_alike(parsed.notes, list(filter(None, wanted["note"]))), parsed.notes
    check_fields(parsed.config, wanted.get("", []))


def test_a_file_of_settings_and_the_distributed_optimizer(tmp_path):
    """The flag asks for stage 1 at least: it goes over the file's 0, and leaves a higher stage."""
    path = tmp_path / "config.json"
    for stage, expected in ((0, 1), (1, 1), (3, 3)):
        path.write_text(json.dumps({"distributed": {"zero_stage": stage}}))
        read = parse_arguments(["--config", str(path), "--use-distributed-optimizer"])
        assert read.config.distributed.zero_stage == expected


def test_notes_change_nothing():
    noted = [
        flag
        for flag, row in compatibility.rows().items()
        if row.verdict in ("note", "not_done") and not row.when and flag not in options_by_flag()
    ]
    assert len(noted) > 400 and parse_arguments(noted).config == Config()


def test_the_table_answers_the_recorded_names_and_no_other():
    recorded = {key(name) for name in recorded_names()}
    counts = {source: len(text.split()) for source, text in data()["names"].items()}
    assert list(counts.values())[:4] == [898, 115, 55, 4]
    assert len(set(recorded_names())) == len(recorded_names()) == sum(counts.values())
    assert recorded - OURS <= set(compatibility.rows()) <= recorded
    for row in table():
        for flag in row.flags:
            if flag.endswith("*"):
                assert any(compatibility.rows().get(name) is row for name in recorded), (
                    f"{flag} is short for no recorded flag"
                )


@pytest.mark.parametrize(
    "line, end",
    [
        ("--async-sav", "did you mean --async-save?"),
        ("--inprocess-restar", "did you mean --inprocess-restart?"),  # not of ours
        ("-lr", "did you mean --lr?"),
        ("--zzzzzzzzzzzz", "--zzzzzzzzzzzz: unknown flag"),
        ("--moe-typo", "--moe-typo: unknown flag"),  # not --rope-type
        ("--tp 2", "did you mean --tensor-model-parallel-size?"),
        (
            "--dp 8",
            "unknown flag; the data-parallel size is the number of ranks / (tensor x context x "
            "pipeline); drop it",
        ),
        (
            "--tokenizer-type TokenizerFromFileWithFIM",
            "give HuggingFaceTokenizer, without tokens for infilling (fill-in-the-middle)",
        ),
        ("--lr-warmup-tokens x", "expected one number of 0 or more"),
        ("--train-tokens 1e400 --seq-length 1", "expected one number of 0 or more"),
    ],
)
def test_an_unknown_flag_is_refused_with_what_was_meant(line, end):
    fault = faults_of(line.split())[0]
    assert fault.startswith(line.split()[0]) and fault.endswith(end)


def test_a_habit_is_nobodys_flag_and_stands_for_a_known_one():
    habits = data()["habits"]
    short = " ".join([*habits.values(), *data()["follows"]]).split()
    assert len(set(short)) == len(short) and not {*short} & {*OURS, *compatibility.rows()}
    assert all(ours in OURS or ours in compatibility.rows() for ours in habits)


def test_the_page_of_flags_is_current():
    command = [sys.executable, "tools/document_flags.py", "--check"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert checked.returncode == 0, checked.stderr
