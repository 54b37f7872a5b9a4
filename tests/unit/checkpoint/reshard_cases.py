"""What one rank does in the resharding tests: whole real runs through pretrain.py that save, load,
and compare what they hold.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from unittest import mock

from checkpoint_cases import part_of, same_bits

from megatron.checkpoint.manifest import iteration_folder
from megatron.checkpoint.reader import Checkpoint
from megatron.config.arguments import parse_arguments
from megatron.training import pretrain
from megatron.training.checkpointing import finalize, save
from megatron.training.exit import Exit
from megatron.training.loop import COMPLETE
from megatron.training.run import Run

BASE = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--micro-batch-size 1 --global-batch-size 4 --train-iters 6
--mock-data --tokenizer-type NullTokenizer --vocab-size 49 --lr 1e-2 --log-interval 1
--eval-iters 0""".split()
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"

# 50 real tokens: no multiple of 4.
FEATURES = {
    # learned positions, biases, dropout; padding on the last rank
    "tied-bf16": "--make-vocab-size-divisible-by 1 --bf16",
    "gqa-untied": f"--make-vocab-size-divisible-by 64 {LLAMA} --group-query-attention "
    "--num-query-groups 2 --qk-layernorm "
    # fewer key/value heads than 4 ranks; ranks that hold padding alone
    "--untie-embeddings-and-output-weights",
    "mqa-fp64": f"--make-vocab-size-divisible-by 1 {LLAMA} --group-query-attention "
    "--num-query-groups 1 --fp64 "
    "--hidden-dropout 0 --attention-dropout 0",
    "untied-fp64": (
        f"--make-vocab-size-divisible-by 1 {LLAMA} --fp64 "
        "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0"
    ),
}
FEATURES |= {
    # Overflows at iterations 1, 2 and 5; the scale falls twice before the checkpoint of iteration
    # 3, grows after it, and falls again.
    "gqa-fp16": (
        f"{FEATURES['gqa-untied']} --fp16 --initial-loss-scale 4194304 --hysteresis 1 "
        "--loss-scale-window 2"
    ),
    # 4, 4, 4 | 4, 8, 8
    "ramp-fp64": f"{FEATURES['untied-fp64']} --global-batch-size 8 --rampup-batch-size 4 4 16",
    "ledger-fp64": FEATURES["mqa-fp64"],  # files, of which the blend has changed at iteration 2
}
TP, CP, PP, SCHEDULE, ZERO = (
    "--tensor-model-parallel-size",
    "--context-parallel-size",
    "--pipeline-model-parallel-size",
    "--pipeline-schedule",
    "--zero-stage",
)
AUTO = "--pipeline-model-parallel-layout auto"  # four stages: embedding, two layers, head
LAYOUTS = {  # name: ranks, flags
    "one": (1, ""),
    "tp2": (2, f"{TP} 2"),
    "tp2sp": (2, f"{TP} 2 --sequence-parallel"),
    "dp2": (2, ""),
    "tp4sp": (4, f"{TP} 4 --sequence-parallel"),
    "tp2dp2": (4, f"{TP} 2"),
    "cp2": (2, f"{CP} 2 --cp-comm-type a2a"),
    "cp2dp2": (4, f"{CP} 2"),
    "pp2": (2, f"{PP} 2 {SCHEDULE} 1f1b"),
    "pp4": (4, f"{PP} 4 {SCHEDULE} 1f1b {AUTO}"),
    "pp2v2": (2, f"{PP} 2 {SCHEDULE} interleaved --num-virtual-stages-per-pipeline-rank 2 {AUTO}"),
    "pp2zbv": (2, f"{PP} 2 {SCHEDULE} zero-bubble-v {AUTO}"),
    "tp2sppp2": (4, f"{TP} 2 --sequence-parallel {PP} 2 {SCHEDULE} zero-bubble"),
    "pp2dp2": (4, f"{PP} 2 {SCHEDULE} gpipe"),
    "dp2zero1": (2, f"{ZERO} 1"),
    "dp2zero2": (2, f"{ZERO} 2"),
    "dp2zero3": (2, f"{ZERO} 3"),
    "dp4zero3shard2": (4, f"{ZERO} 3 --zero-shard-size 2"),
    "cp2dp2zero2": (4, f"{CP} 2 --cp-comm-type p2p {ZERO} 2"),
    "pp2dp2zero2": (4, f"{PP} 2 {SCHEDULE} zero-bubble {ZERO} 2"),
}

# Experts: what is kept in addition to the weights, the bias and the share of each expert, changes
# in steps.
EXPERTS = {
    "moe-fp64": f"{FEATURES['untied-fp64']} --num-experts 8 --moe-ffn-hidden-size 16 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 2e-2 --moe-router-load-balancing-type global_aux_loss "
    "seq_aux_loss --moe-aux-loss-coeff 5e-2 1e-2 --moe-shared-expert-intermediate-size 16 "
    "--moe-shared-expert-gate",
}
EXPERTS["moe-bf16"] = EXPERTS["moe-fp64"].replace("--fp64", "--bf16")
EP = "--expert-model-parallel-size"
EXPERT_LAYOUTS = {
    "dp2ep2": (2, f"{EP} 2"),
    "dp4ep4": (4, f"{EP} 4"),
    "dp4ep2zero1": (4, f"{EP} 2 {ZERO} 1"),
    "dp4ep2zero3": (4, f"{EP} 2 {ZERO} 3"),
    "tp2spep2": (2, f"{TP} 2 --sequence-parallel {EP} 2 --expert-tensor-parallel-size 1"),
    "tp2spdp2ep2": (4, f"{TP} 2 --sequence-parallel {EP} 2"),
    "tp2spdp2zero2": (4, f"{TP} 2 --sequence-parallel {ZERO} 2"),
    "pp2dp2ep2zero2": (4, f"{PP} 2 {SCHEDULE} zero-bubble {EP} 2 {ZERO} 2"),
}
THREE_AXES = {
    "tp2sppp2dp2zero2": (8, f"{TP} 2 --sequence-parallel {PP} 2 {SCHEDULE} zero-bubble {ZERO} 2"),
}
ALL_LAYOUTS = LAYOUTS | EXPERT_LAYOUTS | THREE_AXES


def flags(feature: str, layout: str, *more: object) -> tuple[str, ...]:
    base = [word for word in BASE if word != "--mock-data" or not feature.startswith("ledger")]
    given = (FEATURES | EXPERTS)[feature], ALL_LAYOUTS[layout][1]
    return (*base, *" ".join(given).split(), *map(str, more))


def saving(root: Path) -> tuple[str, ...]:
    return ("--save", str(root), "--save-interval", "3")


def start(arguments: tuple[str, ...], instead: Callable | None = None) -> str:
    """`pretrain_gpt.py arguments...` on this rank, with `instead` in the place of training; what it
    printed, or the error.
    """
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(printed))
        # the world lives on
        stack.enter_context(mock.patch.object(pretrain, "disconnect", lambda: None))
        if instead is not None:
            stack.enter_context(mock.patch.object(pretrain, "train", instead))
        parsed = parse_arguments(list(arguments))
        try:
            code = pretrain.pretrain(parsed.config, parsed.notes)
        except ValueError as error:
            return str(error)
    return f"{printed.getvalue()}exit code {code}"


def load_and_compare(arguments: tuple[str, ...], source: Path) -> list[str]:
    """Load on this rank; what differs from the checkpoint `source`, bit by bit. Then save what was
    loaded, when --save is given.
    """
    faults: list[str] = []
    compared = False

    def compare(run: Run) -> Exit:
        nonlocal compared
        compared, optimizer = True, run.optimizer
        with Checkpoint(source) as checkpoint:
            for box, buffer in [*optimizer.weight_boxes(), *optimizer.state_boxes()]:
                want = part_of(checkpoint.read_tensor(box.name), box.offset, box.extent)
                if not same_bits(box.view(buffer).reshape(box.extent), want):
                    faults.append(f"{box.name} at {box.offset}: not the bits of the checkpoint")
            if (
                optimizer.steps.item() != checkpoint.state["optimizer_steps"]
                or run.progress.iteration != checkpoint.iteration
            ):
                faults.append(f"step {optimizer.steps.item()}, iteration {run.progress.iteration}")
            now = {
                **asdict(run.progress),
                "scaler": run.scaler.state(),
                "ledger": run.data.history,
                "schedule": run.schedule.state(),
            }
            state = checkpoint.state
            faults.extend(
                f"{name}: {value}, in the checkpoint {state[name]}"
                for name, value in now.items()
                if value != state[name]
            )
            faults.extend(_computed_with(run, checkpoint))
        save(run)
        finalize(run)
        return Exit(COMPLETE, 0)

    text = start(arguments, compare)
    assert compared, text
    return faults


def _computed_with(run: Run, checkpoint: Checkpoint) -> list[str]:
    """What differs from the checkpoint in the whole weights that this rank computes with, its
    padding included.
    """
    faults: list[str] = []
    run.zero.start_gathers(run.zero.blocks)
    run.zero.wait_for_weights()
    for block in run.optimizer.blocks:
        for entry in block.entries:
            weight = entry.view(block.weight).clone()
            for box in entry.boxes:
                want = part_of(checkpoint.read_tensor(box.name), box.offset, box.extent)
                if not same_bits(box.view(weight).reshape(box.extent), want.to(weight.dtype)):
                    faults.append(
                        f"{box.name} at {box.offset}: the weights are not the rounded masters"
                    )
                box.view(weight).zero_()
            if weight.any():
                faults.append(f"{entry.name}: the padding is not zero")
        if block.zero_stage == 3:
            block.release()
    return faults


def differing(a: Path, b: Path) -> list[str]:
    """Tensors of two checkpoints that are not the same bits."""
    with Checkpoint(a) as one, Checkpoint(b) as other:
        assert sorted(one.names) == sorted(other.names)
        return [
            name
            for name in one.names
            if not same_bits(one.read_tensor(name), other.read_tensor(name))
        ]


def distance(a: Path, b: Path) -> float:
    """The largest relative difference (by norm) of a tensor of two checkpoints."""
    with Checkpoint(a) as one, Checkpoint(b) as other:
        pairs = [
            (one.read_tensor(name), other.read_tensor(name))
            for name in one.names
            if not name.startswith("optimizer.")
        ]
        return max(((x - y).norm() / x.norm()).item() for x, y in pairs)


def saved(root: Path, iteration: int = 3) -> Path:
    return root / iteration_folder(iteration)
