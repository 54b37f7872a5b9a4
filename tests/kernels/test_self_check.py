"""The check at start: it computes the variants that a run launches; a kernel that is wrong, raises,
kills its process or hangs costs its operator alone; what passed is remembered; one rank's fault is
every rank's.
"""

import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.kernels import cases, dispatch, lang, self_check
from megatron.kernels.self_check import Variant
from megatron.kernels.tools.shipped import compiled_from

from megatron.checkpoint.ranks import Ranks
from megatron.config.arguments import parse_arguments
from megatron.config.errors import UserError
from megatron.distributed.groups import Axis
from megatron.distributed.launchers import Launch
from megatron.training import prepare, pretrain
from megatron.training.kernel_variants import alike
from pretrain_gpt import main

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CHILD = (sys.executable, str(Path(__file__).with_name("faulty_child.py")))
VARIANTS = {
    "rotary": [Variant("rotary", "bfloat16", {"s": 2, "b": 1, "n": 1, "d": 16})],
    "norm": [
        Variant(f"norm {direction}", "bfloat16", {"rows": 2, "width": 16})
        for direction in ("forward", "backward")
    ],
    "adam": [Variant("adamw", "bfloat16", {"size": 32, "grad": "float32"})],
}


@pytest.fixture(autouse=True)
def nothing_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(lang.triton.knobs.cache, "dir", str(tmp_path))
    self_check._versions.cache_clear()
    monkeypatch.setattr(prepare, "FAULTY", dispatch.FAULTY)
    yield
    self_check._versions.cache_clear()
    dispatch.FAULTY.clear()


@pytest.fixture
def check(monkeypatch):
    """The faults of some operators whose kernels fail in ways given by words."""

    def check(*words: str, variants=VARIANTS) -> dict[str, str]:
        monkeypatch.setattr(self_check, "COMMAND", (*CHILD, *words))
        return self_check.faults(variants, CPU)

    return check


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the child is an interpreter's")


@on_cpu
@pytest.mark.parametrize(
    "how, reason",
    [
        ("wrong", "off by 0.1 of the norm"),
        ("raise", "its process ended with exit code 1: RuntimeError: PTXAS failed"),
        ("abort", "its process ended with SIGABRT"),
        ("crash", "its process ended with SIGSEGV"),
    ],
)
@pytest.mark.default("raise-its process ended with exit code 1: RuntimeError: PTXAS failed")
def test_a_fault_costs_its_operator_alone(check, monkeypatch, tmp_path, how, reason):
    """The first variant of the second of three operators: its other variant is not tried after an
    end of the process, the third operator is checked.
    """
    found = check(f"norm={how}", "rotary=print")
    assert found.keys() == {"norm"}
    assert found["norm"].startswith("norm forward (bfloat16, rows 2, width 16): ")
    assert reason in found["norm"]
    # what passed, and nothing else, is remembered: no child is needed, until something changes
    passed = {v.kernel for each in VARIANTS.values() for v in each if has_passed(v)}
    assert passed == {"rotary", "adamw"}
    (rotary,) = VARIANTS["rotary"]
    assert check("start=exit", variants={"rotary": [rotary]}) == {}
    other = Variant("rotary", "float16", rotary.settings)
    assert check("start=exit", variants={"rotary": [other]}).keys() == {"rotary"}
    for file in ("rotary.py", "configurations.json"):
        (tmp_path / file).write_text("another text")
    self_check._versions.cache_clear()
    monkeypatch.setattr(self_check, "HERE", tmp_path)
    assert check("start=exit", variants={"rotary": [rotary]}).keys() == {"rotary"}


def has_passed(variant: Variant) -> bool:
    return self_check._place(variant, CPU).exists()


@on_cpu
@pytest.mark.full
def test_a_hang_costs_its_operator_alone(check, monkeypatch):
    monkeypatch.setattr(self_check, "LIMIT_S", 20)
    found = check("norm=hang")
    assert found.keys() == {"norm"} and found["norm"].endswith("no result after 20 s")
    assert all(has_passed(v) for v in (*VARIANTS["rotary"], *VARIANTS["adam"]))


@on_cpu
def test_a_child_that_does_not_start_checks_nothing(check):
    found = check("start=exit")
    assert found.keys() == VARIANTS.keys()
    assert found["adam"] == (
        "no kernel could be checked: its process ended with exit code 1: CUDA error: out of memory"
    )


def test_the_command_starts_a_child():
    """Without variants it answers that it is ready, and ends."""
    assert self_check._lines_of_child([], CPU) == ([b"ready"], "its process ended with exit code 0")


def test_a_child_that_does_not_become_ready_is_ended(monkeypatch):
    command = [word.replace("alarm(300)", "alarm(1)") for word in self_check.COMMAND]
    command[-1] = command[-1].replace("from megatron", "import time; time.sleep(60); from megatron")
    monkeypatch.setattr(self_check, "COMMAND", command)
    found = self_check.faults(VARIANTS, CPU)
    assert set(found.values()) == {"no kernel could be checked: no result after 300 s"}


MODEL = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 1 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 59 --lr 1e-2 --train-iters 1 --log-interval 1 --eval-iters 0 --bf16"
)
LLAMA = (
    "--normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --hidden-dropout 0 --attention-dropout 0 "
    "--untie-embeddings-and-output-weights"
)
RUNS = {
    "gpt": "--hidden-dropout 0.1 --attention-dropout 0.1 --adam-beta2 0.95",
    "llama": LLAMA,
    "norms of heads": f"{LLAMA} --qk-layernorm --window-size 8 --rotary-percent 0.5",
    "fp32, separate operands": (
        "--normalization RMSNorm --hidden-dropout 0 --attention-dropout 0 --qk-layernorm "
        "--position-embedding-type rope --rotary-backend torch --attn-logit-softcapping 30 "
        "--reset-attention-mask"
    ),
    "experts": f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 "
    "--main-grads-dtype bf16 --exp-avg-dtype bf16",
    "latent": f"{LLAMA.replace('--group-query-attention --num-query-groups 2 ', '')} "
    "--multi-latent-attention --kv-lora-rank 16 --q-lora-rank 24 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 16 --qk-layernorm",
}


def specialisation(kernel, args, kwargs) -> str:
    """What Triton compiles a launch by."""
    given = dict(zip(kernel.arg_names, args)) | kwargs
    names = ("num_warps", "num_stages", "maxnreg")
    options = {name: given.pop(name) for name in names if name in given}
    found = compiled_from("", kernel, SimpleNamespace(launch=lambda: options), given)
    return str(replace(found, kernel=kernel.fn.__name__, row=None))


@on_cpu
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.default("norms of heads")
def test_the_variants_are_those_that_a_run_launches(name, monkeypatch, tmp_path, one_thread):
    """Every launch of a step has the specialisation of a launch of the check."""
    from triton.runtime.interpreter import InterpretedFunction

    launched: dict[str, set] = {"run": set(), "check": set()}
    run, into, prepared = InterpretedFunction.run, ["run"], []

    def record(kernel, *args, grid, warmup, **kwargs):
        launched[into[0]].add(specialisation(kernel, args, kwargs))
        return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", record)
    monkeypatch.setattr(pretrain, "check_kernels", lambda first, *_, **__: prepared.append(first))
    words = f"{MODEL} {RUNS[name]}".split()
    if name.startswith("fp32"):
        words.remove("--bf16")
    for operator, names in dispatch.OPERATORS.items():
        unused = operator == "grouped-gemm" and name != "experts"
        unable = operator == "rotary" and name == "latent"
        flag = dispatch.flag_of(operator)
        if "triton" in names and flag not in words and not (unused or unable):
            words += [flag, "triton"]
    assert main(words) == 0
    into[0] = "check"
    variants = prepare.variants_of_run(prepared[0], CPU)
    for each in variants.values():
        for variant in each:
            assert cases.wrong(cases.case_of(variant, CPU)) == "", variant
    missing = launched["run"] - launched["check"]
    assert launched["run"] and not missing, "\n".join(sorted(missing))


def test_a_smaller_number_compiles_alike():
    for number, smaller in {1: 1, 63: 63, 64: 64, 65: 65, 8192: 64, 8200: 65, 50257: 65}.items():
        assert alike(number, 64) == smaller


def found_by(monkeypatch, faults: dict[str, str]) -> SimpleNamespace:
    """A run that is ready to be checked, with these results."""
    monkeypatch.setattr(prepare, "variants_of_run", lambda prepared, device: {})
    monkeypatch.setattr(prepare, "faults", lambda variants, device: faults)
    return SimpleNamespace()


def test_what_fails_is_left_out_with_a_warning(monkeypatch, caplog):
    prepared = found_by(monkeypatch, {"norm": "norm forward: off by 1"})
    with caplog.at_level(logging.WARNING):
        prepare.check_kernels(prepared, GPU, Ranks(), first_of_node=True)
    assert dispatch.FAULTY == {
        "norm": "the check at start failed on rank 0: norm forward: off by 1"
    }
    assert "norm: our kernels are not used. the check at start failed" in caplog.text
    # `auto` passes over it, and a flag that asks for it is refused
    monkeypatch.setattr(lang, "unsupported_reason", lambda device, dtype: None)
    monkeypatch.setattr(lang, "capability", lambda device: 90)
    choice = dispatch.choose("norm", "auto", GPU, torch.bfloat16)
    assert choice.implementation == "torch" and "failed on rank 0" in choice.because
    with pytest.raises(UserError, match="--norm-backend triton: the check at start failed"):
        dispatch.choose("norm", "triton", GPU, torch.bfloat16)
    prepare.check_kernels(prepared, CPU, Ranks(), first_of_node=True)
    assert dispatch.FAULTY == {}


@pytest.mark.parametrize("device, first_of_node", [(CPU, True), (GPU, False)], ids=str)
def test_nothing_is_started_on_a_cpu_or_by_other_ranks_of_a_node(
    monkeypatch, device, first_of_node
):
    monkeypatch.setattr(prepare, "variants_of_run", lambda *_: pytest.fail("it was asked for"))
    prepare.check_kernels(SimpleNamespace(), device, Ranks(), first_of_node=first_of_node)


def checked_where_one_rank_is_faulty() -> dict[str, str]:
    """What this rank leaves out, when the norm is wrong on rank 1 alone, the first of its node."""
    rank = dist.get_rank()
    world = Axis("world", rank, tuple(range(dist.get_world_size())), dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        found_by(patch, {"norm": "off"} if rank == 1 else {})
        try:
            prepare.check_kernels(SimpleNamespace(), GPU, Ranks(world), first_of_node=True)
            return dict(dispatch.FAULTY)
        finally:
            dispatch.FAULTY.clear()


def test_one_ranks_fault_is_every_ranks(gloo_world):
    found = gloo_world(2).run(checked_where_one_rank_is_faulty)
    assert found == [{"norm": "the check at start failed on rank 1: off"}] * 2


def started_on_nodes_of_one_rank() -> tuple[bool, list[int]]:
    """Whether this rank checks the kernels, and the ranks of its node where host memory is checked
    (on rank 0).
    """
    launch = Launch(dist.get_rank(), 2, 0, 1, "torchrun")
    checked, node_ranks, describe = [], [], pretrain.describe

    def described(*args, node):
        node_ranks.append(node[1])
        return describe(*args, node=node)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "read_launch", [launch].pop)  # once: then torch knows no nodes
        patch.setattr(
            pretrain, "check_kernels", lambda *_, first_of_node: checked.append(first_of_node)
        )
        patch.setattr(pretrain, "describe", described)
        patch.setattr(pretrain, "disconnect", lambda: None)
        parsed = parse_arguments(f"{MODEL} --global-batch-size 2".split())
        assert pretrain.pretrain(parsed.config, parsed.notes) == 0
    return checked[0], node_ranks


def test_nodes_are_those_of_the_launcher_after_the_ranks_have_met(gloo_world):
    found = gloo_world(2).run(started_on_nodes_of_one_rank)
    assert found == [(True, [1]), (True, [])]
