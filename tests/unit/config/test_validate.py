"""Rules between flags: each refuses what it should with the flag and the fix; derived values carry
their reason.
"""

from __future__ import annotations

import itertools
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rule_rows import answers, rows

from megatron.config.arguments import parse_arguments
from megatron.config.derive import RunView
from megatron.config.groups import Config
from megatron.config.options import FIELDS
from megatron.config.rules import EXCLUSIONS, counts, ranges, shown, two_fields
from megatron.config.validate import cross_field_faults, resolve

VALID = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 10 --mock-data --vocab-size 100"
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.bin", "a.idx", "b.bin", "b.idx", "tokenizer.model", "vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "ckpt").mkdir()


def configure(extra: str = "", base: str = VALID) -> Config:
    return parse_arguments(f"{base} {extra}".split()).config


def faults(
    extra: str = "", world: int = 1, vocabulary: int | None = 101, base: str = VALID
) -> list[str]:
    return cross_field_faults(configure(extra, base), world, vocabulary)


def without(*flags: str) -> str:
    kept, dropping = [], False
    for word in VALID.split():
        dropping = word in flags if word.startswith("--") else dropping
        kept += [] if dropping else [word]
    return " ".join(kept)


@pytest.mark.parametrize(
    "extra, fault",
    rows(
        """
# shapes
--num-attention-heads 5
    --hidden-size 64: must be a multiple of --num-attention-heads 5; or give --kv-channels
--group-query-attention
    --group-query-attention: set --num-query-groups
--group-query-attention --num-query-groups 3
    --num-query-groups 3: must divide --num-attention-heads 4
--num-query-groups 2
    --num-query-groups 2: has no effect without --group-query-attention
--position-embedding-type rope --rotary-percent 0.2
    --rotary-percent 0.2: 3 of 16 channels would rotate
--position-embedding-type rope --rope-scaling-factor 4
    --rope-scaling-factor 4.0: has no effect without --use-rope-scaling
--position-embedding-type rope --use-rope-scaling --rope-high-freq-factor 1
    --rope-high-freq-factor 1.0: must be greater
--position-embedding-type rope --use-rope-scaling --rotary-seq-len-interpolation-factor 2
    --use-rope-scaling: is not supported with
--window-size 8 --window-attn-skip-freq [1,0,1]
    --window-attn-skip-freq '[1,0,1]' has 3 entries, and --num-layers is
--window-size 8 --window-attn-skip-freq 0
    --window-attn-skip-freq '0': give 1 or more
--position-embedding-type rope --no-rope-freq every
    --no-rope-freq 'every' is neither a number nor a list of 0 and 1
--attention-backend sdpa
    --attention-backend sdpa: is not supported with --attention-dropout 0.1
# precision
--fp16 --loss-scale 128 --hysteresis 3
    --hysteresis 3: has no effect without dynamic loss scaling
# data and tokenizer
--data-path a
    --data-path: contradicts --mock-data
--train-data-path a
    --mock-data: contradicts --train-data-path
--tokenizer-type SentencePieceTokenizer --vocab-size 101
    --tokenizer-type SentencePieceTokenizer: set --tokenizer-model
--tokenizer-type HuggingFaceTokenizer --vocab-size 101 --tokenizer-model none.json
    --tokenizer-model none.json: no such file
--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.model
    --vocab-size 100: the tokenizer has 101 tokens
# batch
--global-batch-size 15
    must be a multiple of --micro-batch-size 2 x 1 data-parallel rank(s) = 2; the nearest is 16
--global-batch-size 16 --rampup-batch-size 4 4
    --rampup-batch-size 4 4: must be three numbers above 0
--global-batch-size 16 --rampup-batch-size 4 3 100
    start and increment must be multiples of
--global-batch-size 16 --rampup-batch-size 4 8 100
    --global-batch-size 16 must be the start plus a number of increments
# length and schedule
--train-samples 100
    --train-iters 10: contradicts --train-samples 100
--train-iters 0
    --train-iters 0: nothing would be trained
--lr-decay-samples 100
    --lr-decay-samples 100: the run is measured in --train-iters; use --lr-decay-iters
--lr-warmup-iters 10
    --lr-warmup-iters 10: must be smaller than --lr-decay-iters 10
--lr-warmup-iters 2 --lr-warmup-fraction 0.1
    --lr-warmup-fraction 0.1: contradicts --lr-warmup-iters 2
--lr-decay-style WSD
    --lr-decay-style WSD: give --lr-wsd-decay-iters
--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-warmup-iters 2
    --lr-wsd-decay-iters 9: does not fit
--min-lr 1
    --lr 0.001: must be at least --min-lr 1.0
--min-lr 1e-4 --decoupled-lr 1e-5
    --decoupled-lr 1e-05: must be at least --min-lr 0.0001
--swiglu --hidden-size 16
    --ffn-hidden-size is required: 8/3 x hidden-size rounded down to a multiple of 64 is 0 for
    --hidden-size 16
--weight-decay-incr-style cosine --end-weight-decay 0.1
    --weight-decay-incr-style cosine: set --start-weight-decay
# optimizer
--adam-implementation apex --optimizer-cpu-offload
    --optimizer-cpu-offload: is not supported with --adam-implementation apex
--activation-offload --offload-modules attn_proj
    --offload-modules attn_proj: core attention keeps attn_proj's input too
--activation-offload --offload-modules layer_input
    --offload-modules layer_input: layer_input needs recomputed layers
--activation-offload --offload-modules mlp_act --recompute-granularity full
    --offload-modules mlp_act: --recompute-granularity full keeps only layer inputs
--activation-offload --torch-compile
    --activation-offload: is not supported with --torch-compile
--activation-offload --recompute auto --memory-budget 10
    --activation-offload: is not supported with --recompute auto, which plans
# recompute, checkpoint, logging, world
--checkpoint-activations --recompute-num-layers 20
    --num-layers 2: must be at least --recompute-num-layers 20
--recompute-granularity full --recompute-method block
    --recompute-method block: give --recompute-num-layers
--recompute-granularity selective --torch-compile
    --recompute-granularity selective: is not supported with --torch-compile
--save ckpt --local-checkpoint-dir a
    --local-checkpoint-dir a: has no effect without --local-save-interval N
--save ckpt --async-save --async-save-host-memory 1 --local-checkpoint-dir a --local-save-interval 5
    --async-save-host-memory 1.0: has no effect without --async-save without --local-checkpoint-dir
--save ckpt --save-interval 4 --save-retain-interval 10
    --save-retain-interval 10: must be a multiple of --save-interval
--load absent
    --load absent: no such folder; for a first start give the same folder as --save
--save a.bin
    --save a.bin: is a file, not a folder
--padded-vocab-size 100
    --padded-vocab-size 100: the tokenizer has 101 tokens; give that or more
--global-batch-size 16 --step-batch-size-schedule 0:4 1K:8
    --global-batch-size 16: contradicts the last step of --step-batch-size-schedule
--step-batch-size-schedule 0:4 1K:8 --rampup-batch-size 4 4 100
    --step-batch-size-schedule 0:4 1000:8: contradicts --rampup-batch-size 4 4 100
--step-batch-size-schedule 0:5,1K:8 --micro-batch-size 2
    --step-batch-size-schedule 0:5 1000:8: 5 must be a multiple of --micro-batch-size 2
--step-batch-size-schedule 1K:8
    1K:8: the first step must be at 0 tokens
--step-batch-size-schedule 0:8 1:16
    two steps begin at 0 samples
--tiled-mlp 3 --seq-length 16
    --tiled-mlp 3: must divide the 16 positions of the sequence that a rank holds; the nearest that
    fits is 2
--profile --save ckpt --profile-ranks 0 1
    --profile-ranks 0 1: there is no rank 1; ranks count from 0
# folders that cannot be made, and sizes that would take minutes to plan
--save /dev/null/x
    --save /dev/null/x: cannot be made: /dev/null is not a folder
--metrics-file a.bin/metrics.jsonl
    --metrics-file a.bin/metrics.jsonl: its folder is a file, not a folder
--num-layers 1000000000
    --num-layers 1000000000: 1,000,000,000 layers, at most 10,000 are planned for
--global-batch-size 1000000000
    --global-batch-size 1000000000: 500,000,000 micro-batches in each step of a rank
--tensor-model-parallel-size 2
    --tensor-model-parallel-size 2: does not divide the 1 rank(s) of this job; start 2 (in a dry
    run, with --world-size)
"""
    ),
)
def test_one_rule(extra, fault):
    found = faults(extra)
    assert len(found) == 1 and fault in found[0], found


@pytest.mark.parametrize(
    "extra, note",
    rows(
        """
--check-data
    --check-data: has no effect without data files
--lr-decay-style constant --min-lr 1e-4
    --min-lr 0.0001: has no effect without a --lr-decay-style that decays
--no-load-optim
    --no-load-optim: has no effect without --load DIR
--bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16
    --exp-avg-sq-dtype bf16: with --adam-beta2 0.999 a step changes the moment by less than bf16
--hysteresis 3 --min-loss-scale 2 --loss-scale-window 5
    --hysteresis 3: has no effect without --fp16
"""
    ),
)
def test_what_does_no_harm_is_a_note(extra, note):
    """Launch scripts give flags without effect in every run."""
    assert faults(extra) == []
    notes = resolve(configure(extra), 1, 101).notes
    assert any(line.startswith(note) for line in notes), notes


def test_every_bound_is_a_fault_beyond_it():
    bounded = {name: option.bound for name, option in FIELDS.items() if option.bound}
    assert len(bounded) > 80
    for name, bound in bounded.items():
        candidates = map(FIELDS[name].kind, (-1, 0, 1, 1.5, 2**70))
        beyond = [value for value in candidates if not bound.holds(value)]
        assert beyond, name
        for value in beyond:
            config = configure().with_fields(FIELDS[name].group, **{name: value})
            fault = f"{FIELDS[name].names[0]} {value}: must be {bound.text}"
            assert fault in ranges(RunView(config, 1, 101))


def test_sizes_that_would_take_minutes_to_plan_are_refused_at_once():
    pipeline = (
        "--dry-run --world-size 2 --pipeline-model-parallel-size 2 --num-layers 8 "
        "--global-batch-size 200000"
    )
    (found,) = faults(f"{pipeline} --pipeline-schedule gpipe", 2)
    assert "800,000 passes of layers and micro-batches in a step, at most 500,000" in found
    assert faults(pipeline, 2) == []  # 1f1b repeats itself after a few


def test_a_name_on_the_hub_is_answered_with_how_to_download_it():
    flags = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"
    (found,) = faults(f"{flags} meta-llama/Llama-3.1-8B", vocabulary=None)
    assert "run `hf download meta-llama/Llama-3.1-8B tokenizer.json" in found
    for path in ("data/tokenizer.model", "ckpt/llama", "a/b/c"):
        text = f"--tokenizer-model {path}: no such file; tokenizers are read from local files only"
        assert faults(f"{flags} {path}", vocabulary=None) == [text]


@pytest.mark.parametrize(
    "dropped, extra, fault",
    [
        ("--num-layers", "", "--num-layers is required"),
        ("--lr", "", "--lr is required"),
        ("--train-iters", "", "--train-iters or --train-samples is required"),
        (
            "--mock-data",
            "--tokenizer-type NullTokenizer",
            "--data-path PREFIX is required (or --train-data-path, or --mock-data)",
        ),
        (
            "--vocab-size",
            "",
            "--tokenizer-type is required; with --mock-data, --vocab-size N is enough",
        ),
    ],
)
def test_required_flags(dropped, extra, fault):
    assert faults(extra, base=without(dropped)) == [fault]


def test_each_exclusion_of_the_table_is_a_fault():

    def counting(config: Config, rule: str) -> Config:
        """The configuration with a value of the rule's field with which the rule counts."""
        option = FIELDS[rule.partition("=")[0]]
        values = rule.partition("=")[2].split(",") if "=" in rule else ("2", "3", "0.5")
        for word in ("true", "false") if option.kind is bool else (*option.choices, *values):
            if option.choices and word not in option.choices:
                continue
            value = option.parse([str(word)])
            changed = config.with_fields(option.group, **{option.field: value})
            if counts(RunView(changed, 1, 101), rule):
                return changed
        raise AssertionError(rule)

    for ones, others, why, _ in EXCLUSIONS:
        for one, other in itertools.product(ones.split(), others.split()):
            run = RunView(counting(counting(configure(), one), other), 1, 101)
            fault = f"{shown(run, one)}: is not supported with {shown(run, other)}{why}; "
            assert any(found.startswith(fault) for found in two_fields(run)), fault


@pytest.mark.parametrize(
    "extra",
    """\
--num-attention-heads 3 --kv-channels 20
--num-query-groups 4
--position-embedding-type rope --rotary-percent 0.5 --use-rope-scaling --rope-scaling-factor 4
--position-embedding-type yarn --yarn-original-max-position-embeddings 4096
--attention-backend sdpa --attention-dropout 0
--fp16 --initial-loss-scale 4096 --hysteresis 1
--global-batch-size 16 --rampup-batch-size 4 4 100
--lr-decay-style WSD --lr-wsd-decay-iters 3
--lr-decay-iters 100 --lr-warmup-iters 10 --lr-warmup-init 1e-6
--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1
--decoupled-lr 1e-3 --freeze head --untie-embeddings-and-output-weights
--bf16 --main-grads-dtype bf16 --grad-reduce-in-bf16
--optimizer-nvme-offload disk --optimizer-offload-fraction 0.5
--save new --load new --save-interval 5 --save-retain-interval 10 --save-keep-last 2
--load ckpt --finetune --no-load-optim
--save new --async-save --local-checkpoint-dir a --local-save-interval 5
--tiled-mlp 16 --seq-length 16 --recompute-activations""".splitlines(),
)
def test_valid_combinations(extra):
    assert faults(extra) == []


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--data-path 0.3 a 0.7 b", []),
        ("--data-path a b --split 90,10", []),
        ("--train-data-path a --valid-data-path b", []),
        ("--data-path a c", ["--data-path c: no such file: c.idx and c.bin"]),
        ("--data-path 0.3 a b", ["--data-path 0.3 a b: give a weight before each prefix"]),
        ("--train-data-path 1 a 1", ["--train-data-path 1 a 1: give a weight before each"]),
        ("--valid-data-path b", ["--valid-data-path: --train-data-path is missing"]),
        ("--data-path a --train-data-path b", ["--data-path: contradicts --train-data-path"]),
    ],
)
def test_data_files(flags, expected):
    found = faults(flags, base=without("--mock-data") + " --tokenizer-type NullTokenizer")
    assert len(found) == len(expected) and all(map(str.startswith, found, expected)), found


# Ranks and flags, and the beginning of each fault.
LAYOUTS = """
6 --tensor-model-parallel-size 4
    fault --tensor-model-parallel-size 4: does not divide the 6 rank(s) of this job; start 8
3 --tensor-model-parallel-size 3 --ffn-hidden-size 255
    fault --tensor-model-parallel-size 3: must divide --num-attention-heads 4; the nearest that f
16 --num-attention-heads 16 --group-query-attention --num-query-groups 8 \
--tensor-model-parallel-size 16
12 --num-attention-heads 12 --hidden-size 96 --group-query-attention --num-query-groups 6 \
--tensor-model-parallel-size 4
    fault --tensor-model-parallel-size 4: must divide --num-query-groups 6 or be a multiple of it
4 --tensor-model-parallel-size 4 --sequence-parallel --seq-length 30
    fault --seq-length 30: must be a multiple of --tensor-model-parallel-size 4; the nearest is 32
4 --tensor-model-parallel-size 4 --sequence-parallel --checkpoint-activations \
--distribute-saved-activations
    fault --distribute-saved-activations: is not supported with --sequence-parallel, which shards
4 --tensor-model-parallel-size 4 --checkpoint-activations --hidden-size 36 --micro-batch-size 1 \
--seq-length 31 --kv-channels 8 --distribute-saved-activations
4 --tensor-model-parallel-size 4 --checkpoint-activations --hidden-size 34 --micro-batch-size 1 \
--seq-length 31 --kv-channels 8 --ffn-hidden-size 64 --distribute-saved-activations
    fault --distribute-saved-activations: the 1054 elements of a layer's input are not
4 --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --seq-length 64 \
--global-batch-size 2 --tiled-mlp 32
    fault --tiled-mlp 32: must divide the 16 positions of the sequence that a rank holds
8 --tensor-model-parallel-size 2 --global-batch-size 16 --rampup-batch-size 4 4 100
    fault --rampup-batch-size 4 4 100: start and increment must be multiples of --micro-batch
""".replace("\\\n", "")


@pytest.mark.parametrize("line, wanted", answers(LAYOUTS, "fault"))
def test_rules_of_layouts(line, wanted):
    world, _, flags = line.partition(" ")
    found = faults(f"--dry-run --world-size {world} {flags}", int(world))
    texts = wanted.get("fault", [])
    assert len(found) == len(texts) and all(map(str.startswith, found, texts)), found


@given(st.integers(1, 64), st.integers(1, 40), st.integers(1, 40), st.integers(1, 200))
def test_the_proposed_tensor_parallel_size_is_accepted(tp, groups, queries, world):
    flags = (
        f"--num-attention-heads {groups * queries} --kv-channels 16 --group-query-attention "
        f"--num-query-groups {groups} --ffn-hidden-size "
        f"{math.lcm(*range(1, 9))} --dry-run --world-size {world}"
    )
    found = [
        fault
        for fault in faults(f"{flags} --tensor-model-parallel-size {tp}", world)
        if fault.startswith("--tensor-model")
    ]
    proposed = {match[1] for fault in found if (match := re.search(r"fits is (\d+)$", fault))}
    assert len(proposed) <= 1
    for size in proposed:
        assert not any(
            fault.startswith("--tensor-model")
            for fault in faults(f"{flags} --tensor-model-parallel-size {size}", world)
        )


def test_derived_values_and_their_reasons():
    flags = "--swiglu --checkpoint-activations --dry-run --world-size 4"
    resolved = resolve(configure(flags), 4, 101)
    before, after = configure(flags).to_dict(), resolved.config.to_dict()
    changed = {
        field: value
        for group, fields in after.items()
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
    noted = {note.split(" = ")[0].replace("-", "_") for note in resolved.notes if " = " in note}
    assert noted == changed.keys() - {"num_virtual_stages_per_pipeline_rank", "pipeline_schedule"}
    assert "global-batch-size = 8: micro-batch-size x 4 data-parallel rank(s)" in resolved.notes
    wide = resolve(configure("--hidden-size 4096 --swiglu"), 1, None).config
    assert wide.model.ffn_hidden_size == int(4 * 4096 * 2 / 3 / 64) * 64 == 10880


def test_lengths_are_derived():
    by_samples = configure("--train-samples 100", base=without("--train-iters"))
    optimizer = resolve(by_samples, 1, 101).config.optimizer
    assert (optimizer.lr_decay_samples, optimizer.lr_decay_iters) == (100, None)
    evaluation = configure("--skip-train --load ckpt", base=without("--lr", "--train-iters"))
    config = resolve(evaluation, 1, 101).config
    assert (config.training.train_iters, config.optimizer.lr) == (0, 0.0)


def test_resolving_twice_changes_nothing():
    flags = "--swiglu --checkpoint-activations --position-embedding-type rope --load ckpt"
    once = resolve(configure(flags), 1, 101)
    again = resolve(Config.from_dict(json.loads(json.dumps(once.config.to_dict()))), 1, 101)
    assert again.config == once.config and not any(" = " in note for note in again.notes)


def test_rules_survive_any_single_odd_value():
    """No combination of one field's extreme value with a valid run makes a rule itself fail."""
    config = configure()
    for option in FIELDS.values():
        odd = (None, -1, 0, 10**9) if option.kind is int and not option.many else (None,)
        for value in odd:
            if value is not None or option.default is None:
                changed = config.with_fields(option.group, **{option.field: value})
                cross_field_faults(changed, 1, 101)


def test_remarks_on_valid_settings():
    notes = " | ".join(resolve(configure("--window-size 32 --split 9,1"), 1, 101).notes)
    for note in (
        "--window-size 32 covers --seq-length 32",
        "--split 9,1: mock data has no documents to divide",
        "--save is not set: no checkpoints or metrics will be written",
        "--activation gelu is the exact (erf) form",  # Megatron-LM's default is the tanh form
    ):
        assert note in notes
    quiet = resolve(configure("--window-size 31 --save new --activation gelu-tanh"), 1, 101).notes
    assert all(" = " in note for note in quiet)  # derived values alone
