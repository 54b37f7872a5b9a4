"""The command line: round trips, every fault at once, and what shells do to words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from config_lines import LINE, faults_of
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.arguments import dump_config, parse_arguments
from megatron.config.compatibility import GUIDE
from megatron.config.errors import ArgumentErrors, UserError
from megatron.config.groups import Config
from megatron.config.help import COMMANDS, PAGES, explained, help_text
from megatron.config.options import FIELDS, options_by_flag

VALID = LINE.split()


def every_field_set() -> list[str]:
    """A line that gives each field a value that is not its default, in its last spelling."""
    argv = ["--dry-run"]
    for option in FIELDS.values():
        if option.kind is bool:
            argv.append(option.off[0] if option.default else option.names[-1])
            continue
        usual = ("3", "0.5") if option.kind in (int, float) else ("é x", "0:16")
        words = list(map(str, option.choices)) or usual[option.kind is float :][:1]
        word = next(word for word in words if option.parse([word]) != option.default)
        argv += [option.names[-1].replace("_", "-"), word, *[word] * option.many]
    return argv


@pytest.mark.parametrize("as_yaml", [False, True])
def test_a_printed_configuration_reads_back(tmp_path, as_yaml: bool):
    config = parse_arguments(every_field_set()).config
    path, text = tmp_path / "config", dump_config(config)
    path.write_text(yaml.safe_dump(config.to_dict()) if as_yaml else text, encoding="utf-8")
    assert parse_arguments(["--dry-run", "--config", str(path)]).config == config
    assert Config.from_dict(json.loads(text)) == config


ODD = ("--moe-x", "--deepspeed", "--swiglu", "--config", "--=", "-", "--")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(sorted(options_by_flag())), st.sampled_from(ODD), st.text(max_size=6)
        ),
        max_size=8,
    )
)
def test_any_words_parse_or_give_argument_errors(argv: list[str]):
    if "-h" in argv:
        return
    try:
        parse_arguments(argv)
    except ArgumentErrors as error:
        assert error.faults and all(
            "\n" not in fault or any("\n" in word for word in argv) for fault in error.faults
        )


def test_every_field_has_a_flag_a_help_and_its_default():
    fields = [field for group in Config().to_dict().values() for field in group]
    assert sorted(fields) == sorted(FIELDS)
    assert all(option.help for option in FIELDS.values())
    assert parse_arguments([]).config == Config()
    text = help_text(["--help", "all"])
    spellings = [flag for option in FIELDS.values() for flag in option.spellings]
    assert all(flag in text for flag in (*spellings, *COMMANDS))


@pytest.mark.parametrize(
    "words, there, absent",
    [
        ("--lr oops --help", "optimizer      36 flags", "--lr-decay-style"),
        ("--help optimizer", "--lr-decay-style", "--save-interval"),
        ("-h all", "--lr-decay-style", "never there"),
    ],
)
def test_help_is_printed(capsys, words, there, absent):
    with pytest.raises(SystemExit) as stopped:
        parse_arguments(words.split())
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and there in text and absent not in text


def test_faults_name_the_pages_that_explain_their_flags():
    root = Path(__file__).resolve().parents[3]
    assert all((root / name).is_file() for _, name in PAGES)
    error = ArgumentErrors(["--zero-stage 5: x", "--num-experts: y", "--unknown: z"])
    assert explained(error) == f"{error}\nexplained in docs/zero.md, docs/experts.md"
    for other in (ArgumentErrors(["--unknown: z", "--num-layers is required"]), UserError("x")):
        assert explained(other) == str(other)


def test_command_line_wins_over_the_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: {num_layers: 4, hidden_size: 128}\noptimizer:\n  lr: 1e-4  # a string for "
        "YAML 1.1\n"
    )
    config = parse_arguments(["--num-layers", "6", "--config", str(path)]).config
    found = config.model.num_layers, config.model.hidden_size, config.optimizer.lr
    assert found == (6, 128, 1e-4)


@pytest.mark.parametrize(
    "text, fault",
    [
        ("model: {num_layer: 4}", "model has no setting 'num_layer'; did you mean num_layers?"),
        ("modell: {num_layers: 4}", "'modell' is not a group of settings"),
        ("model: {num_layers: many}", "model.num_layers = 'many': expected a number"),
        (
            "model: {group_query_attention: null}",
            "model.group_query_attention = None: expected true or false",
        ),
        ("model: [", "cannot be read"),
        ("- 1", "expected groups with settings"),
        (
            '{"model": {"num_layers": 2}, "model": {"hidden_size": 8}}',
            "the key 'model' occurs twice",
        ),
        ("model:\n  num_layers: 2\n  num_layers: 3", "the key 'num_layers' occurs twice"),
        ("model: {num_layers: 010}", "line 1: 010 is octal in some versions of YAML"),
        ("model: &a {num_layers: 2}\ndata: *a", "aliases are not read here"),
        ("model: {num_layers: 2, [1]: 2}", "line 1: a key is not text"),
        ("[" * 20_000, "nested deeper than 64 levels"),
        ('model: {num_layers: "' + "9" * 300 + '"}', "expected a whole number of at most 64 bits"),
        ("model: {num_layers: " + "9" * 5000 + "}", "cannot be read"),
        ("data: {data_path: [true, a]}", "expected a list of words or numbers"),
        ('{"checkpoint": {"save": "\\ud800"}}', "half of a surrogate pair"),
        ('checkpoint: {save: "\\0"}', "holds a character that a path cannot hold"),
        ("{" + ", ".join(f"a{number}: 1" for number in range(60)) + "}", "a59"),
        # flat names of flags
        ("num_layer: 4", "--num-layer 4: unknown flag; did you mean --num-layers?"),
        ("bert_loda: false", "--bert-loda: unknown flag"),
    ],
)
def test_faults_in_a_configuration_file(tmp_path, text, fault):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert any(fault in line and str(path) in line for line in faults_of(["--config", str(path)]))


@pytest.mark.parametrize(
    "text, program",
    [
        ("pipe-parallel-size: 1\nmodel-parallel-size: 2", "GPT-NeoX"),
        ("trainer: {devices: 8}\nexp_manager: {}\nmodel: {}", "NeMo"),
        ("general: {project: x}\nparallelism: {dp: 2}\nmodel: {}", "nanotron"),
    ],
)
def test_another_programs_file_gets_one_sentence(tmp_path, text, program):
    path = tmp_path / "other.yaml"
    path.write_text(text)
    (fault,) = [line for line in faults_of(["--config", str(path)]) if str(path) in line]
    assert f"of {program}, which is not read; {GUIDE}" in fault


@pytest.mark.parametrize("flag", ["--config", "--save"])
@pytest.mark.parametrize(
    "path, fault",
    [
        ("x" * 5000, "is too long: Linux takes 3,900 bytes, 255 for each name"),
        ("a/" + "x" * 256, "255 for each name"),
        ("x\udcff", "holds a character that a path cannot hold"),
        ("runs/$SAVE", "holds a shell variable that was not replaced; write its value"),
        ("${SAVE}/a", "holds a shell variable that was not replaced; write its value"),
    ],
)
def test_what_no_path_can_be(flag, path, fault):
    found = [line for line in faults_of([*VALID, flag, path]) if flag in line]
    assert len(found) == 1 and fault in found[0] and len(found[0]) < 200


def test_all_faults_at_once():
    wrong = (
        "--num-layer 3 --lr fast --seq-length 1.5 --fp8-recipe delayed --retro-workdir "
        "x --bf16 --fp16 --zero3-keep-gathered "
    )
    faults = faults_of([*VALID, *(wrong + "--nan-policy ignore --lr-decay-style cosin").split()])
    expected = [
        "--num-layer 3: unknown flag; did you mean --num-layers?",
        "--lr fast: expected a number",
        "--seq-length 1.5: expected a whole number",
        "--fp8-recipe delayed: not a recipe here; give --fp8-recipe tensorwise, rowwise or "
        "blockwise",
        "--retro-workdir x: retrieval",
        "--bf16: is not supported with --fp16",
        "--zero3-keep-gathered: has no effect without --zero-stage 3",
        "--nan-policy ignore: choose from stop, skip",
        "did you mean cosine?",
    ]
    for text in expected:
        assert sum(text in fault for fault in faults) == 1, text
    assert len(faults) == len(expected)


def test_rules_say_nothing_about_a_flag_whose_value_is_unknown():
    line = [word for word in VALID if word not in ("--lr", "1e-3")]
    assert faults_of([*line, "--lr", "x"]) == ["--lr x: expected a number"]
    assert faults_of([*line, "--l-r", "1"]) == ["--l-r 1: unknown flag; did you mean --lr?"]


@pytest.mark.parametrize(
    "argv, fault",
    [
        (["--lr", "--bf16"], "--lr: no value follows it (is a shell variable unset?)"),
        (["--lr="], "--lr '': no value follows it"),
        (["--lr", "1", "2"], "--lr 1 2: takes one value"),
        (["--bf16", "yes"], "--bf16 yes: it takes no value"),
        (["stray", "--bf16"], "stray: unexpected argument"),
        (["--bf16", "-x"], "-x: unexpected argument"),
        (
            ["--tokenizer-type NullTokenizer"],
            "'--tokenizer-type NullTokenizer': flag and value are quoted together as one word",
        ),
        (["--lr", "nan"], "expected a number"),
        (["--world-size", "8"], "--world-size 8: only with --dry-run"),
        (["--dry-run", "now"], "--dry-run now: takes no value"),
        (["--config"], "--config: takes one file"),
        (["--swiglu", "x"], "--swiglu x: it takes no value"),
        (["--swiglu", "--squared-relu"], "--squared-relu: contradicts --swiglu; drop one of them"),
        (["--window-size", "511,1"], "--window-size 511,1: Megatron's pair must be W-1,0"),
        (["--window-size", "-1,0"], "for -1 drop the flag"),
        (["--help", "optimiser"], "did you mean optimizer?"),
        (["--recompute-modules", "mpl"], "--recompute-modules mpl: choose from core_attn, qkv"),
    ],
)
def test_one_fault(argv, fault):
    with pytest.raises(UserError, match=re.escape(fault)):
        parse_arguments(argv)


@pytest.mark.parametrize(
    "words, field, value",
    [
        ("--override-opt_param-scheduler", "override_opt_param_scheduler", True),
        ("--disable-bias-linear", "add_bias_linear", False),
        ("--bf16 --no-bf16", "bf16", False),
        ("--split '99,1,0'", "split", "99,1,0"),
        ("--data-path 0.5 a -0.5 b", "data_path", ("0.5", "a", "-0.5", "b")),
        ("--window-size (511,0)", "window_size", 512),
        ("--train-samples 1e6", "train_samples", 1_000_000),
        ("--rampup-batch-size 16 16 5859375", "rampup_batch_size", (16, 16, 5859375)),
        ("--tokenizer-type Llama2Tokenizer", "tokenizer_type", "SentencePieceTokenizer"),
    ],
)
def test_spellings(words, field, value):
    groups = parse_arguments(words.split()).config.to_dict().values()
    assert [fields[field] for fields in groups if field in fields] == [value]


def test_a_repeated_flag_takes_the_last_value_and_says_so():
    parsed = parse_arguments(["--lr", "1e-3", "--lr", "2e-3"])
    assert parsed.config.optimizer.lr == 2e-3 and parsed.notes == [
        "--lr 1e-3 is overridden by the later --lr 2e-3"
    ]
    assert parse_arguments(["--lr", "1e-3", "--lr", "0.001"]).notes == []
