"""The recorded runs: every schedule, ZeRO stage, precision, and what else may change numbers.

A run is a command line (`BASE`, then its own flags: a later one wins), and the launches that follow
it in the same folder. Each launch may have its own layout.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from itertools import product

BASE = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32
    --micro-batch-size 1 --global-batch-size 4 --train-iters 4
    --tokenizer-type NullTokenizer --vocab-size 49 --init-method-std 0.2 --lr 1e-2
    --lr-warmup-iters 2 --log-interval 1 --eval-interval 3 --eval-iters 1 --log-params-norm
    --no-log-straggler --mock-data --save {save}
"""
PLAIN = "--hidden-dropout 0 --attention-dropout 0"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
LLAMA = f"""
    {PLAIN} --activation swiglu --normalization RMSNorm --position-embedding-type rope
    --disable-bias-linear --untie-embeddings-and-output-weights
"""
GROUPED = "--group-query-attention --num-query-groups 2"
DOCUMENTS = "--reset-attention-mask --reset-position-ids --eod-mask-loss"
CAPS = "--attn-logit-softcapping 3 --final-logit-softcapping 2 --z-loss-coeff 1e-2"
FULL = "--recompute-granularity full"
EXPERTS = f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24"
CAPACITY = f"{EXPERTS} --moe-expert-capacity-factor 0.8 --moe-layer-freq 2"
BIASED = f"""
    {EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-load-balancing-type global_aux_loss seq_aux_loss --moe-aux-loss-coeff 5e-2 1e-2
    --moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate
"""
YARN = "--position-embedding-type yarn --rope-scaling-factor 4 --mscale 0.7 --mscale-all-dim 1.2"
LATENT = f"""
    {LLAMA} --multi-latent-attention --kv-lora-rank 12 --q-lora-rank 24 --qk-head-dim 8
    --qk-pos-emb-head-dim 4 --v-head-dim 6 --qk-layernorm
"""
SGD = "--optimizer sgd --lr 0.1"
# Scales so high that the first steps overflow, and a window so short that later ones do again.
FP16 = "--fp16 --initial-loss-scale 4194304 --loss-scale-window 2 --train-iters 8"

TP2 = "--tensor-model-parallel-size 2"
SP = f"{TP2} --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2 --global-batch-size 8"
PP4 = "--pipeline-model-parallel-size 4 --global-batch-size 8"
EP2 = "--expert-model-parallel-size 2"
CP2 = "--context-parallel-size 2"
SCHEDULES = {
    "gpipe": "--pipeline-schedule gpipe",
    "1f1b": "",
    "interleaved": "--num-virtual-stages-per-pipeline-rank 2",
    "zero-bubble": "--pipeline-schedule zero-bubble",
    "zero-bubble-v": "--pipeline-schedule zero-bubble-v",
}
SERIAL = "--no-overlap-grad-reduce --no-overlap-param-gather"
TRITON = " ".join(
    f"--{operator}-backend triton"
    for operator in ("attention", "norm", "rotary", "activation", "dropout", "cross-entropy")
)


@dataclass(frozen=True)
class Launch:
    """One start of the program: its number of processes and its flags on top of the run's."""

    ranks: int
    flags: str = ""


@dataclass(frozen=True)
class GoldenRun:
    """A run by name, and its launches in turn."""

    name: str
    flags: str
    launches: tuple[Launch, ...]

    def command_lines(self, save: str, state: str) -> list[list[str]]:
        """The flags of each launch, with the folders of checkpoints and of the optimizer's
        files.
        """
        lines = []
        for number, launch in enumerate(self.launches):
            load = "--load {save}" if number else ""
            lines.append(f"{BASE} {self.flags} {load} {launch.flags}")
        return [shlex.split(line.format(save=save, state=state)) for line in lines]


def _one(name: str, ranks: int, flags: str) -> GoldenRun:
    return GoldenRun(name, flags, (Launch(ranks),))


def _resumed(name: str, flags: str, *launches: tuple[int, str]) -> GoldenRun:
    """A run that stops after each launch but the last, two iterations later each time."""
    made = []
    for number, (ranks, own) in enumerate(launches):
        last = number == len(launches) - 1
        stop = "" if last else f"--exit-interval {2 * (number + 1)}"
        made.append(Launch(ranks, f"{own} {stop}"))
    return GoldenRun(name, f"{flags} --global-batch-size 8", tuple(made))


def golden_runs() -> list[GoldenRun]:
    """All runs, in the order in which they are made."""
    dense = [*_one_process(), *_tensor(), *_pipelines(), *_sharded(), *_mixed()]
    return [*dense, *_experts(), *_latent(), *_context(), *_resumes()]


def _one_process() -> list[GoldenRun]:
    features = {
        "gpt": PLAIN,
        "dropout": DROPOUT,
        "llama": LLAMA,
        "bf16": f"{LLAMA} --bf16",
        "bf16, narrow state": f"{LLAMA} --bf16 --main-grads-dtype bf16 --exp-avg-dtype bf16 "
        "--exp-avg-sq-dtype bf16",
        "fp16": f"{LLAMA} {FP16}",
        "fp64": f"{DROPOUT} --fp64",
        "sgd": f"{PLAIN} {SGD} --weight-decay 0.1 --clip-grad 0.5",
        "grouped, norms of queries": f"{LLAMA} {GROUPED} --qk-layernorm --add-qkv-bias",
        "documents": f"{DROPOUT} {DOCUMENTS}",
        "documents, window, rope": f"{LLAMA} {DOCUMENTS} --window-size 7",
        "caps": f"{PLAIN} {CAPS}",
        "head in chunks": f"{LLAMA} {CAPS} --fused-linear-cross-entropy",
        "geglu, yarn": f"{PLAIN} --activation geglu --position-embedding-type yarn "
        "--rope-scaling-factor 4 --rope-original-max-position-embeddings 16",
        "squared relu, no positions": f"{PLAIN} --activation squared-relu "
        "--position-embedding-type none",
        "plain attention": f"{PLAIN} --attention-backend plain",
        "recompute": f"{DROPOUT} {FULL}",
        "ramp-up": f"{LLAMA} --rampup-batch-size 2 2 12 --train-iters 6 --lr-decay-style cosine",
        "wsd": f"{PLAIN} --lr-decay-style WSD --lr-wsd-decay-iters 2 --train-iters 6 "
        "--start-weight-decay 0 --end-weight-decay 0.2 --weight-decay-incr-style cosine",
        "frozen": f"{LLAMA} --freeze embedding,layers.0-1 --log-num-zeros-in-grad",
        "frozen, tied": f"{PLAIN} --freeze layers.1,layers.3",
        "on the host": f"{LLAMA} --bf16 --optimizer-cpu-offload",
        "on the host, fp16": f"{LLAMA} {FP16} --optimizer-cpu-offload",
        "half on the host": f"{PLAIN} --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
        "in files": f"{LLAMA} --bf16 --optimizer-nvme-offload {{state}}",
        "weights on the host": f"{LLAMA} --bf16 --zero-stage 3 --param-cpu-offload",
        "kernels": f"{LLAMA} {TRITON} --num-layers 2 --train-iters 2 --lr-warmup-iters 0 "
        "--hidden-dropout 0.1 "
        "--eval-iters 0",
    }
    return [_one(f"one process: {name}", 1, flags) for name, flags in features.items()]


def _tensor() -> list[GoldenRun]:
    return [
        _one("tp2", 2, f"{TP2} {DROPOUT}"),
        _one("tp2, llama, bf16", 2, f"{TP2} {LLAMA} --bf16"),
        _one("tp2 sp", 2, f"{SP} {DROPOUT}"),
        _one("tp2 sp, fp16", 2, f"{SP} {LLAMA} {FP16}"),
        _one("tp2 sp, fp64, grouped", 2, f"{SP} {LLAMA} {GROUPED} --fp64 --qk-layernorm"),
        _one("tp2 sp, recompute, documents", 2, f"{SP} {DROPOUT} {FULL} {DOCUMENTS}"),
        _one("tp2 sp, head in chunks", 2, f"{SP} {LLAMA} --fused-linear-cross-entropy {CAPS}"),
        _one(
            "tp4 sp, one key head",
            4,
            f"{SP} --tensor-model-parallel-size 4 {PLAIN} --group-query-attention "
            "--num-query-groups 1 --qk-layernorm",
        ),
    ]


def _pipelines() -> list[GoldenRun]:
    runs = []
    for name, flags in SCHEDULES.items():
        runs.append(_one(f"pp2 {name}", 2, f"{PP2} {flags} {DROPOUT}"))
        runs.append(_one(f"pp2 {name}, llama, bf16", 2, f"{PP2} {flags} {LLAMA} --bf16"))
    return [
        *runs,
        _one("pp2 zero-bubble, fp16", 2, f"{PP2} {SCHEDULES['zero-bubble']} {LLAMA} {FP16}"),
        _one("pp2 zero-bubble, recompute", 2, f"{PP2} {SCHEDULES['zero-bubble']} {DROPOUT} {FULL}"),
        _one("pp2 1f1b, uneven", 2, f"{PP2} {PLAIN} --decoder-first-pipeline-num-layers 3"),
        _one(
            "pp2 interleaved, ramp-up",
            2,
            f"{PP2} {SCHEDULES['interleaved']} {LLAMA} --rampup-batch-size 4 4 12",
        ),
        _one("pp4 1f1b", 4, f"{PP4} {PLAIN}"),
        _one("pp4 interleaved", 4, f"{PP4} {SCHEDULES['interleaved']} {LLAMA} --num-layers 8"),
    ]


def _sharded() -> list[GoldenRun]:
    runs = []
    for stage in range(4):
        zero = f"--zero-stage {stage}"
        runs.append(_one(f"dp2 zero{stage}", 2, f"{zero} {DROPOUT}"))
        runs.append(_one(f"dp2 zero{stage}, llama, bf16", 2, f"{zero} {LLAMA} --bf16"))
    return [
        *runs,
        _one("dp2 zero3, kept gathered", 2, f"--zero-stage 3 --zero3-keep-gathered {DROPOUT}"),
        _one("dp2 zero2, serial", 2, f"--zero-stage 2 {SERIAL} {PLAIN}"),
        _one("dp2 zero3, serial, recompute", 2, f"--zero-stage 3 {SERIAL} {PLAIN} {FULL}"),
        _one("dp2 zero1, sums in bf16", 2, f"--zero-stage 1 --grad-reduce-in-bf16 {LLAMA} --bf16"),
        _one("dp2 zero3, fp16", 2, f"--zero-stage 3 {LLAMA} {FP16}"),
        _one("dp2 zero2, sgd, frozen", 2, f"--zero-stage 2 {SGD} {LLAMA} --freeze layers.0"),
        _one("dp2 zero2, on the host", 2, f"--zero-stage 2 {LLAMA} --bf16 --optimizer-cpu-offload"),
        _one("dp2 zero3, weights on the host", 2, f"--zero-stage 3 {LLAMA} --param-cpu-offload"),
        _one(
            "dp2 zero3, in files",
            2,
            f"--zero-stage 3 {LLAMA} --bf16 --optimizer-nvme-offload {{state}}",
        ),
        _one("dp4 zero2, shared by 2", 4, f"--zero-stage 2 --zero-shard-size 2 {DROPOUT}"),
        _one("dp4 zero3, shared by 2", 4, f"--zero-stage 3 --zero-shard-size 2 {LLAMA} --bf16"),
    ]


def _mixed() -> list[GoldenRun]:
    runs = []
    for (name, schedule), stage in product(SCHEDULES.items(), (1, 2, 3)):
        if (name, stage) not in {("gpipe", 1), ("gpipe", 3), ("interleaved", 1), ("1f1b", 2)}:
            flags = f"{PP2} {schedule} --zero-stage {stage} {LLAMA}"
            runs.append(_one(f"pp2 {name} dp2 zero{stage}", 4, flags))
    split = SCHEDULES["zero-bubble"]
    return [
        *runs,
        _one("tp2 dp2", 4, f"{TP2} {DROPOUT}"),
        _one("tp2 sp dp2 zero2, bf16", 4, f"{SP} --zero-stage 2 {LLAMA} --bf16"),
        _one("tp2 sp dp2 zero3", 4, f"{SP} --zero-stage 3 {DROPOUT} {DOCUMENTS}"),
        _one("tp2 sp pp2 zero-bubble, bf16", 4, f"{SP} {PP2} {split} {LLAMA} --bf16"),
        _one("tp2 pp2 1f1b, fp64", 4, f"{TP2} {PP2} {DROPOUT} --fp64"),
        _one(
            "tp2 sp pp2 zero-bubble dp2 zero3, recompute",
            8,
            f"{SP} {PP2} {split} --zero-stage 3 {LLAMA} {FULL} --bf16",
        ),
        _one(
            "tp2 sp pp2 interleaved dp2 zero1, mapping",
            8,
            f"{SP} {PP2} {SCHEDULES['interleaved']} --zero-stage 1 {DROPOUT} "
            "--use-tp-pp-dp-mapping",
        ),
        _one(
            "pp2 zero-bubble-v dp2 zero3, weights on the host, recompute",
            4,
            f"{PP2} {SCHEDULES['zero-bubble-v']} --zero-stage 3 --param-cpu-offload {LLAMA} {FULL}",
        ),
    ]


def _experts() -> list[GoldenRun]:
    return [
        _one("dp2 ep2, experts", 2, f"{EP2} {EXPERTS} --moe-aux-loss-coeff 1e-2 --fp64"),
        _one("dp4 ep2 zero3, experts of limited capacity", 4, f"{EP2} --zero-stage 3 {CAPACITY}"),
        _one(
            "tp2 sp dp2 ep2 zero1, experts with a bias, bf16",
            4,
            f"{SP} {EP2} --expert-tensor-parallel-size 1 --zero-stage 1 {BIASED} --bf16",
        ),
        _one(
            "pp2 1f1b dp2 ep2 zero2, experts, pairs of micro-batches",
            4,
            f"{PP2} {EP2} --zero-stage 2 --overlap-moe-expert-parallel-comm {BIASED}",
        ),
    ]


def _latent() -> list[GoldenRun]:
    return [
        _one("one process: latent attention", 1, f"{LATENT} {YARN}"),
        _one("tp2 sp, latent attention, recompute", 2, f"{SP} {LATENT} {FULL} --bf16"),
    ]


def _context() -> list[GoldenRun]:
    return [
        _one("cp2 ring, documents", 2, f"{CP2} --cp-comm-type p2p {DROPOUT} {DOCUMENTS}"),
        _one("cp2 a2a zero2", 2, f"{CP2} --cp-comm-type a2a --zero-stage 2 {LLAMA} {GROUPED}"),
        _one("cp2 gathered, bf16", 2, f"{CP2} {LLAMA} {DOCUMENTS} --window-size 7 --bf16"),
    ]


def _resumes() -> list[GoldenRun]:
    zero_bubble = f"{PP2} {SCHEDULES['zero-bubble']} --zero-stage 3"
    return [
        _resumed("resumed: same layout", DROPOUT, (1, ""), (1, "")),
        _resumed(
            "resumed: tp2 sp dp2 zero3, then pp2 zero2, then one process",
            f"{LLAMA} --bf16 --train-iters 6",
            (4, f"{SP} --zero-stage 3"),
            (4, f"{PP2} --zero-stage 2"),
            (1, ""),
        ),
        _resumed(
            "resumed: pp2 zero-bubble dp2 zero3, then tp2", DROPOUT, (4, zero_bubble), (2, TP2)
        ),
        _resumed(
            "resumed: fp16, dp2 zero1, then zero2",
            f"{LLAMA} {FP16}",
            (2, "--zero-stage 1"),
            (2, "--zero-stage 2"),
        ),
        _resumed(
            "resumed: background saves, dp2 zero2",
            f"{LLAMA} --async-save --save-interval 1",
            (2, "--zero-stage 2"),
            (1, ""),
        ),
        _resumed(
            "resumed: in files, then on the device",
            f"{LLAMA} --bf16",
            (2, "--zero-stage 3 --optimizer-nvme-offload {state}"),
            (2, "--zero-stage 1"),
        ),
        _resumed(
            "resumed: ramp-up, pp2 interleaved, then dp2",
            f"{LLAMA} --rampup-batch-size 4 4 16",
            (2, f"{PP2} {SCHEDULES['interleaved']}"),
            (2, "--zero-stage 2"),
        ),
    ]
