"""Training throughput against other trainers, as ratios of interleaved runs: in one process on a
CPU or a GPU against Hugging Face Trainer, litgpt and a plain PyTorch loop; in two processes over
Gloo against torch's DistributedDataParallel, DeepSpeed's ZeRO-0 and PipelineModule, and
megatron-core. Mixtures of experts are measured against Hugging Face Trainer and megatron-core.

    python benchmarks/training.py --setup DIR    # once: the peers' environments, pinned
    python benchmarks/training.py --peers DIR --settings fp32 --out docs/results/training_cpu.json

Every program trains the same
8.9M-parameter Llama-style GPT (18.5M with experts, 9.0M in the shape of GPT-2) from the same
weights on the same tokens (peers: benchmarks/peers/); ours is `pretrain_gpt.py`. On a CPU all
programs of a setting are started together and take their steps in turns: one trains a few steps
while the others wait, in turning order, so that a machine whose speed drifts is the same for all.
Every 7 turns all are started anew. A ratio is our tokens per second by the peer's in the same round
of turns; it passes by ratio_rule.py. The table ends with the mean loss of the last steps of both
sides: equal work gives equal losses (litgpt alone draws its own weights). A pair counts when
other processes used less than --quiet cores during both of its turns; the JSON keeps every turn,
counted or not. On a machine that never is quiet, --cpu-time compares tokens per CPU second on one
thread instead: less than the whole truth, but steady. torch.compile is off everywhere, AdamW is
torch's fused kernel, gradients are clipped to 1, master weights and moments are fp32, and gradients
are summed over ranks in fp32 (DeepSpeed with bf16: in bf16).

On a GPU (scripts/gpu/peers.sh) every run is a whole job, timed from the end of its last warm-up
step to the end of its last step, ours by the stamps of its console lines, peers by events of the
GPU. The plain loop also runs under torch.compile and with Liger's kernels, and peers run in this
interpreter's environment. A row there has MFU and peak memory, and fails when the mean losses of
the warm-up steps differ by more than 1e-3 of themselves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(__file__).resolve().parent / "peers"
if not __package__:  # run as a file: this folder's `kernels` and `data` must hide no package
    sys.path[0] = str(ROOT)

from megatron.benchmarks import ratio_rule
from megatron.benchmarks.peers.common import STEPS_IN_TURNS, Work
from megatron.benchmarks.peers.start import write_start
from megatron.benchmarks.turn_group import KEPT_MEMORY, Group
from megatron.tools._report.metrics_file import read_metrics

TORCH = "torch==2.13.0"
ENVIRONMENTS = {  # torch is installed first, by its pin, so that no requirement replaces it
    "hf": ["transformers==5.23.0", "accelerate==1.15.0"],
    "litgpt": ["litgpt==0.5.9", "numpy<2"],
    "deepspeed": ["deepspeed==0.19.8", "numpy==2.3.5"],
    "megatron-core": ["megatron-core==0.16.1", "einops==0.8.2", "numpy==2.3.5"],
    "torchtitan": ["torchtitan==0.3.0", "numpy==2.4.6", "triton==3.6.0"],
}


@dataclass(frozen=True)
class Peer:
    """A script, the environment that runs it (None and on a GPU: this interpreter's), the work it
    can do, and its options.
    """

    script: str
    environment: str | None
    takes: Callable[[Work], bool]
    options: str = ""


def in_one_process_without_dropout(work: Work) -> bool:
    """What trainers do that have no dropout in our places; theirs are Llama's models."""
    return work.processes == 1 and work.dropout == 0 and work.shape == "Llama"


def on_a_gpu(work: Work) -> bool:
    return work.device == "cuda"


def only_dense_data_parallel(work: Work) -> bool:
    return work.processes == work.data_parallel > 1 and not work.experts


PEERS = {
    "plain loop": Peer(
        "plain_loop.py", None, lambda work: work.processes == 1 and not work.experts
    ),
    "Hugging Face Trainer": Peer("hf_trainer.py", "hf", in_one_process_without_dropout),
    "litgpt": Peer(
        "litgpt_pretrain.py",
        "litgpt",
        lambda work: in_one_process_without_dropout(work) and not work.experts,
    ),
    "plain loop, compiled": Peer("plain_loop.py", None, on_a_gpu, "compile"),
    "Liger": Peer("plain_loop.py", None, on_a_gpu, "liger"),
    "Liger, compiled": Peer("plain_loop.py", None, on_a_gpu, "liger,compile"),
    "torchtitan": Peer("torchtitan_train.py", None, on_a_gpu),
    "torchtitan, compiled": Peer("torchtitan_train.py", None, on_a_gpu, "compile"),
    "torch DDP": Peer("plain_loop.py", None, only_dense_data_parallel),
    "DeepSpeed ZeRO-0": Peer("deepspeed_zero0.py", "deepspeed", only_dense_data_parallel),
    "DeepSpeed pipeline": Peer(
        "deepspeed_pipeline.py",
        "deepspeed",
        lambda work: work.processes == work.pipeline_parallel > 1,
    ),
    "megatron-core": Peer(
        "megatron_core.py", "megatron-core", lambda work: work.processes > 1 or work.experts > 0
    ),
}
DP2 = Work(data_parallel=2, micro_batch=2, steps=20, warmup=5)
TP2 = Work(tensor_parallel=2, micro_batch=4, steps=20, warmup=5)
# the head costs as much as 2.7 layers
PP2 = Work(
    pipeline_parallel=2, first_stage_layers=4, micro_batch=1, accumulation=8, steps=10, warmup=5
)
# two of these experts multiply as much as one MLP of the work without experts
EXPERTS = {"experts": 8, "topk": 2, "expert_ffn": 344}
EP2 = {**EXPERTS, "expert_parallel": 2}
GPT2 = {"shape": "GPT-2", "ffn": 1024}
GPU = {"accumulation": 4, "precision": "bf16", "steps": 12, "warmup": 4, "lr": 1e-4, "lr_warmup": 2}
GPU_8B = {"layers": 6, "hidden": 4096, "heads": 32, "query_groups": 8, "ffn": 14336}
GPU_1B = {"layers": 24, "hidden": 2048, "heads": 16, "query_groups": 16, "ffn": 5504}
GPU_125M = {"layers": 12, "hidden": 768, "heads": 12, "query_groups": 12, "ffn": 2048}
SETTINGS = {
    "fp32": Work(),
    "bf16": Work(precision="bf16"),
    "fp32, 4 micro-batches": Work(accumulation=4, steps=15, warmup=5),
    "bf16, 4 micro-batches": Work(accumulation=4, steps=15, warmup=5, precision="bf16"),
    "fp32, dropout 0.1": Work(dropout=0.1),
    "bf16, dropout 0.1": Work(dropout=0.1, precision="bf16"),
    "fp32, GPT-2 shape": Work(**GPT2),
    "bf16, GPT-2 shape": Work(**GPT2, precision="bf16"),
    "fp32, dp2": DP2,
    "fp32, tp2": TP2,
    "fp32, tp2 sp": replace(TP2, sequence_parallel=1),
    "fp32, pp2, 8 micro-batches": PP2,
    "fp32, pp2 zero-bubble, 8 micro-batches": replace(PP2, schedule="zero-bubble"),
    "bf16, dp2": replace(DP2, micro_batch=4, precision="bf16"),
    "bf16, tp2": replace(TP2, micro_batch=8, precision="bf16"),
    "bf16, tp2 sp": replace(TP2, micro_batch=8, sequence_parallel=1, precision="bf16"),
    "fp32, 8 experts top-2": Work(**EXPERTS),
    "bf16, 8 experts top-2": Work(**EXPERTS, precision="bf16"),
    "fp32, 8 experts top-2, ep2": replace(DP2, **EP2),
    "bf16, 8 experts top-2, ep2": replace(DP2, **EP2, micro_batch=4, precision="bf16"),
    # the models of scripts/gpu/common.sh
    "125M on a GPU": Work(**GPU_125M, **GPU, vocab=50304, seq=1024, micro_batch=16, device="cuda"),
    "1.3B on a GPU": Work(**GPU_1B, **GPU, vocab=50304, seq=2048, micro_batch=4, device="cuda"),
    "8B-layers on a GPU": Work(
        **GPU_8B, **GPU, vocab=128256, seq=8192, micro_batch=1, device="cuda"
    ),
    "rehearsal of a GPU": Work(
        layers=2, hidden=64, heads=4, query_groups=2, ffn=128, vocab=128, seq=32, **GPU
    ),
}
LOSSES_EQUAL = 1e-3  # of the first losses of both sides in bf16: a mean over a thousand tokens
SHAPES = {
    "Llama": "--position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear",
    "GPT-2": "--position-embedding-type learned_absolute --normalization LayerNorm "
    "--activation gelu",
}
GOAL = 1.0
TURN_STEPS = 4  # micro-batches of a turn on a CPU
TURNS = 7  # of a program until all are started anew
STAMP = re.compile(r" \[([^]]+)\] iteration +(\d+)/")


def setup(folder: Path, names: Sequence[str]) -> None:
    """Make the peers' virtual environments of these names."""
    # DeepSpeed builds no CUDA kernels
    environ = {**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    for name in names:
        packages = ENVIRONMENTS[name]
        print(f"{folder / name}: {TORCH} {' '.join(packages)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
        pip = [
            str(folder / name / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
        ]
        subprocess.run(
            [*pip, TORCH, *(package for package in packages if package.startswith("numpy"))],
            check=True,
        )
        subprocess.run([*pip, TORCH, *packages], check=True, env=environ)


def our_flags(work: Work) -> list[str]:
    """`pretrain_gpt.py`'s flags for the same work; one console line every `warmup` steps."""
    assert work.steps % work.warmup == 0
    flags = f"""--num-layers {work.layers} --hidden-size {work.hidden}
    --ffn-hidden-size {work.ffn} --num-attention-heads {work.heads}
        --seq-length {work.seq} {SHAPES[work.shape]}
        --untie-embeddings-and-output-weights --hidden-dropout {work.dropout}
        --attention-dropout 0 --mock-data
        --tokenizer-type NullTokenizer --vocab-size {work.vocab - 1}
        --micro-batch-size {work.micro_batch}
        --global-batch-size {work.step_samples} --train-iters {work.steps} --lr {work.lr}
        --lr-decay-style cosine
        --lr-warmup-iters {work.lr_warmup} --clip-grad 1 --adam-beta2 0.95 --weight-decay 0.1
        --eval-iters 0 --log-interval {work.warmup}
        --tensor-model-parallel-size {work.tensor_parallel}"""
    # every core computes: there is no communication to overlap
    serial = ["--no-overlap-grad-reduce"] * (work.data_parallel > 1)
    stages = (
        f"""--pipeline-model-parallel-size {work.pipeline_parallel}
        --pipeline-schedule {work.schedule}
        --decoder-first-pipeline-num-layers {work.first_stage_layers}""".split()
        if work.pipeline_parallel > 1
        else []
    )
    experts = f"""--num-experts {work.experts} --moe-router-topk {work.topk}
        --moe-ffn-hidden-size {work.expert_ffn}
        --expert-model-parallel-size {work.expert_parallel}""".split()
    grouped = f"--group-query-attention --num-query-groups {work.query_groups}".split()
    return [
        *flags.split(),
        *grouped * (work.query_groups > 0),
        *experts * (work.experts > 0),
        *serial,
        *stages,
        *["--sequence-parallel"] * work.sequence_parallel,
        *["--bf16"] * (work.precision == "bf16"),
    ]


def command_of(who: str, work: Work, peers: Path, start: Path, in_turns: bool = False) -> list[str]:
    """One program as a command line."""
    if who == "ours":
        script = SCRIPTS / "host_ours.py" if in_turns else ROOT / "pretrain_gpt.py"
        python, arguments = sys.executable, our_flags(work)
    else:
        peer = PEERS[who]
        python = (
            sys.executable
            if peer.environment is None or on_a_gpu(work)
            else str(peers / peer.environment / "bin" / "python")
        )
        script = SCRIPTS / peer.script
        arguments = [str(start), *replace(work, options=peer.options).arguments()]
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(work.processes)]
        if work.processes > 1 and not in_turns
        else []
    )
    return [python, *launcher, str(script), *arguments]


def our_answer(lines: list[tuple[str, float]], work: Work) -> dict:
    """Throughput between the console lines of the last warm-up step and of the last step; each line
    with the CPU seconds used until then.
    """
    stamps, losses = {}, []
    for line, cpu in lines:
        if match := STAMP.match(line):
            stamps[int(match[2])] = datetime.fromisoformat(match[1]), cpu
            losses.append(float(line.split("lm loss:")[1].split()[0]))
    (start, cpu_start), (end, cpu_end) = stamps[work.warmup], stamps[work.steps]
    # a run may fit into one tick
    elapsed, cpu = (
        (end - start).total_seconds(),
        max(cpu_end - cpu_start, 1 / os.sysconf("SC_CLK_TCK")),
    )
    return {
        "tokens_per_second": work.timed_tokens / elapsed,
        "tokens_per_cpu_second": work.timed_tokens / cpu,
        "losses": losses,
    }


def cpu_seconds(pid: int) -> float:
    """CPU seconds that a process and its living children have used so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    seconds = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(OSError):  # it may have ended
            seconds += cpu_seconds(int(child))
    return seconds


def busy_seconds() -> float:
    """CPU seconds that all processes of the machine have used, time stolen by its host included."""
    user, nice, system, _, _, interrupts, soft, steal = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    )
    return (user + nice + system + interrupts + soft + steal) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(quiet: float, patience: float = 600.0) -> None:
    """Return when other processes use less than `quiet` cores for two seconds, or after `patience`
    seconds.
    """
    start = time.monotonic()
    while quiet < math.inf and time.monotonic() - start < patience:
        busy = busy_seconds()
        time.sleep(2)
        if (busy_seconds() - busy) / 2 < quiet:
            return


def watched(
    command: list[str], threads: int, **environ: str
) -> tuple[list[tuple[str, float]], dict]:
    """Run a job to its end: its lines, each with the CPU seconds used until then, and its exit
    code, its seconds and how busy the machine was with other work.
    """
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "DS_ACCELERATOR": "cpu",
        **KEPT_MEMORY,
        **environ,
    }
    load, busy, begun = os.getloadavg()[0], busy_seconds(), time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        cwd=tempfile.gettempdir(),
    )
    lines = [(line, cpu_seconds(process.pid)) for line in process.stdout]
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall, others = (
        time.perf_counter() - begun,
        busy_seconds() - busy - usage.ru_utime - usage.ru_stime,
    )
    return lines, {
        "exit_code": process.returncode,
        "wall_seconds": round(wall, 2),
        "load_before": load,
        "others_cores": round(max(0.0, others / wall), 3),
    }


def failed(command: list[str], lines: list[tuple[str, float]], exit_code: int) -> RuntimeError:
    """What to raise when a job fails."""
    last = "".join(line for line, _ in lines[-80:])
    return RuntimeError(f"{' '.join(command)}\nended with {exit_code}:\n{last}")


def answers(lines: Iterable[str]) -> list[dict]:
    """What a peer reported."""
    found = (line for line in lines if line.startswith("RESULT "))
    return [json.loads(line.removeprefix("RESULT ")) for line in found]


def run(who: str, work: Work, peers: Path, start: Path) -> dict:
    """One job from start to end: its answer and how busy the machine was with other work. Raises
    RuntimeError when it fails.
    """
    command = command_of(who, work, peers, start)
    metrics = start / "metrics.jsonl"
    if who == "ours" and on_a_gpu(work):
        metrics.unlink(missing_ok=True)
        command += ["--metrics-file", str(metrics)]
    lines, facts = watched(command, work.threads)
    results = answers(line for line, _ in lines)
    # DeepSpeed's threads sometimes abort at exit, after the answer
    if facts["exit_code"] and not results:
        raise failed(command, lines, facts["exit_code"])
    answer = our_answer(lines, work) if who == "ours" else results[0]
    if who == "ours" and on_a_gpu(work):
        answer["peak_bytes"] = max(row["mem-max-allocated-bytes"] for row in read_metrics(metrics))
    return {**answer, **facts}


@dataclass(frozen=True)
class Rule:
    """What is compared, and which runs count."""

    pairs: int
    quiet: float  # cores that others may use on average during a counted run
    speed: str  # the figure of a run: tokens_per_second or tokens_per_cpu_second
    until: float = math.inf  # the time, by time.monotonic(), after which no run begins
    drops_failing: bool = False  # a peer that fails is left out of later rounds

    def counted(self, runs: list[dict], setting: str, peer: str) -> list[tuple[float, float]]:
        """(our speed, the peer's) in every round in which both runs had the machine to
        themselves.
        """
        fine = {
            (r["round"], r["who"]): r[self.speed]
            for r in runs
            if r["setting"] == setting and r["others_cores"] < self.quiet
        }
        return [
            (speed, fine[index, peer])
            for (index, who), speed in fine.items()
            if who == "ours" and (index, peer) in fine
        ]

    def has_enough(self, runs: list[dict], setting: str, peers: list[str]) -> bool:
        return all(len(self.counted(runs, setting, peer)) >= self.pairs for peer in peers)


def applicable_peers(peers: Sequence[str], work: Work) -> list[str]:
    """The peers that can train this work."""
    return [peer for peer in peers if PEERS[peer].takes(work)]


def rounds(
    name: str, work: Work, peers: list[str], folder: Path, start: Path, rule: Rule, runs: list[dict]
) -> Iterator[int]:
    """Measure one setting round by round until every peer has enough counted pairs, at most three
    times as many, or the time of the rule is over; appends each run to runs, then yields its round.

    `folder` holds the peers' environments; the folder `start` is written first.
    """
    order = ["ours", *applicable_peers(peers, work)]
    write_start(start, work, our_flags(work))
    for index in range(3 * rule.pairs):
        turn = index % len(order)
        for who in order[turn:] + order[:turn]:
            if time.monotonic() > rule.until:
                print(f"# {name}: the window is over", flush=True)
                return
            wait_until_quiet(rule.quiet)
            try:
                answer = run(who, work, folder, start)
            except (OSError, RuntimeError) as error:
                if not rule.drops_failing or who == "ours":
                    raise
                print(f"# {name}, {who} failed and is left out: {error}", flush=True)
                order.remove(who)
                continue
            runs.append({"setting": name, "round": index, "who": who, **answer})
            speed, others = runs[-1][rule.speed], runs[-1]["others_cores"]
            print(
                (
                    f"{name}, round {index}, {who}: {speed:.0f} {rule.speed}; others used "
                    f"{others} cores"
                ),
                flush=True,
            )
            yield index
        if rule.has_enough(runs, name, order[1:]):
            return


def turns(
    name: str, work: Work, peers: list[str], folder: Path, start: Path, rule: Rule, runs: list[dict]
) -> Iterator[int]:
    """The same on a CPU, where all programs run together and take their steps in turns."""
    # a clock begins after the first step
    count = 1 + work.warmup + TURNS * turn_steps(work)
    work = replace(work, steps=-(-count // work.warmup) * work.warmup)
    order = ["ours", *applicable_peers(peers, work)]
    write_start(start, work, our_flags(work))
    commands = {who: command_of(who, work, folder, start, in_turns=True) for who in order}
    for first in range(0, 3 * rule.pairs, TURNS):
        for index, run in turns_of_a_start(commands, work, first, rule):
            runs.append({"setting": name, "round": index, **run})
            yield index
        for peer in order[1:]:
            ratios = [ours / theirs for ours, theirs in rule.counted(runs, name, peer)]
            median = statistics.median(ratios or [math.nan])
            print(f"{name}, {peer}: {len(ratios)} pairs, median ratio {median:.3f}", flush=True)
        if rule.has_enough(runs, name, order[1:]):
            return


def turn_steps(work: Work) -> int:
    return max(1, TURN_STEPS // work.accumulation)


def turns_of_a_start(
    commands: dict[str, list[str]], work: Work, first: int, rule: Rule
) -> Iterator[tuple[int, dict]]:
    """Start all programs and give each TURNS turns, in rounds from `first` on: (round, run). The
    runs of the last round come at the end, with the losses of all steps.
    """
    order, indices = [*commands], range(first, first + TURNS)
    groups: dict[str, Group] = {}
    last: dict[str, dict] = {}
    try:
        for who, command in commands.items():
            environ = {STEPS_IN_TURNS: "1"}
            groups[who] = Group(who, command, work.processes, work.threads, **environ)

        # 1. The warm-up, then the turns: another program begins each round.
        losses = {who: one_turn(groups[who], work, work.warmup)[1] for who in order}
        wait_until_quiet(rule.quiet)
        for index in indices:
            turn = index % len(order)
            for who in order[turn:] + order[:turn]:
                speeds, more = one_turn(groups[who], work, turn_steps(work))
                losses[who] += more
                last[who] = {"who": who, **speeds, "losses": []}
                if index != indices[-1]:
                    yield index, last[who]

        # 2. Peers report their losses when they end.
        for who in order[1:]:
            (answer,) = answers(groups[who].rest())
            losses[who] = answer["losses"][: len(losses["ours"])]
    finally:
        for group in groups.values():
            group.end()
    for who, run in last.items():
        yield indices[-1], run | {"losses": losses[who]}


def one_turn(group: Group, work: Work, steps: int) -> tuple[dict, list[float]]:
    """(speeds of a program's next steps and how busy the machine was with other work, our losses;
    peers give none).
    """
    busy = busy_seconds()
    ranks = group.turn(f"time {steps}")
    seconds, cpu = max(rank["seconds"] for rank in ranks), sum(rank["cpu"] for rank in ranks)
    speeds = {
        "tokens_per_second": steps * work.step_tokens / seconds,
        "tokens_per_cpu_second": steps * work.step_tokens / cpu,
        "others_cores": round(max(0.0, (busy_seconds() - busy - cpu) / seconds), 3),
    }
    return speeds, ranks[0]["losses"]


def last_loss(run: dict, work: Work) -> float | None:
    """Mean loss of the last `warmup` steps, of which our console lines are means."""
    losses = run["losses"]
    if run["who"] == "ours" and on_a_gpu(work):
        return losses[-1]
    return statistics.mean(losses[-work.warmup :]) if losses else None


def summary(runs: list[dict], settings: dict[str, Work], rule: Rule) -> list[dict]:
    """One row for each setting and peer."""
    rows = []
    for setting, peer in dict.fromkeys(
        (r["setting"], r["who"]) for r in runs if r["who"] != "ours"
    ):
        if pairs := rule.counted(runs, setting, peer):
            ours, theirs = zip(*pairs)
            row = {
                "setting": setting,
                "peer": peer,
                "ours": statistics.median(ours),
                "theirs": statistics.median(theirs),
            }
            row["step_tokens"] = settings[setting].step_tokens
            losses = dict.fromkeys(("ours", peer))
            for run in runs:
                if run["setting"] == setting and run["losses"]:
                    losses[run["who"]] = last_loss(run, settings[setting])
            row |= {"our_loss": losses["ours"], "their_loss": losses[peer]}
            row |= asdict(ratio_rule.verdict([a / b for a, b in pairs], GOAL))
            if on_a_gpu(settings[setting]):
                row |= gpu_figures(runs, row, settings[setting])
            rows.append(row)
    return rows


def gpu_figures(runs: list[dict], row: dict, work: Work) -> dict:
    """MFU and peak bytes of both sides of a row, and whether their losses before the clock starts
    are equal; unequal ones fail the row. MFU counts both sides' tokens by the FLOP of
    megatron/model/arithmetic.py against the GPU's dense bf16 peak.
    """
    import torch

    from megatron.config.arguments import parse_arguments
    from megatron.config.validate import resolve
    from megatron.model.arithmetic import flops_per_iteration, peak_tflops

    config = resolve(parse_arguments(our_flags(work)).config, 1, work.vocab).config
    flops = flops_per_iteration(config.model, work.step_samples, work.seq, work.vocab)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = peak_tflops(name, "bfloat16")
    last = {r["who"]: r for r in runs if r["setting"] == row["setting"]}
    found: dict = {"peak_bytes": [], "mfu": [], "first_losses": []}
    for side, who in (("ours", "ours"), ("theirs", row["peer"])):
        share = peak and flops * row[side] / work.step_tokens / (peak * 1e12)
        losses = last[who]["losses"]
        if who != "ours":
            losses = [statistics.mean(losses[: work.warmup])] if losses else [math.nan]
        found["mfu"].append(share)
        found["peak_bytes"].append(last[who].get("peak_bytes"))
        found["first_losses"].append(losses[0])
    ours, theirs = found["first_losses"]
    found["equal_losses"] = abs(ours - theirs) < LOSSES_EQUAL * abs(ours)
    return found | {"passed": row["passed"] and found["equal_losses"]}


def table(rows: list[dict]) -> str:
    """The rows as Markdown."""
    lines = [
        (
            "| setting | peer | our tokens/s | peer's | our step, ms | peer's | ratio (95% "
            "interval) | pairs | verdict | our loss | peer's |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        interval = f"{row['median']:.3f} ({row['low']:.3f}-{row['high']:.3f})"
        verdict = (
            "reached"
            if row["passed"]
            else "unequal losses"
            if not row.get("equal_losses", True)
            else "lost"
            if row["pairs"] >= ratio_rule.PAIRS
            else "too few quiet pairs"
        )
        speeds = f"{row['ours']:.0f} | {row['theirs']:.0f}"
        steps = " | ".join(
            f"{1000 * row['step_tokens'] / row[side]:.0f}" for side in ("ours", "theirs")
        )
        losses = " | ".join(
            "-" if row[side] is None else f"{row[side]:.5f}" for side in ("our_loss", "their_loss")
        )
        lines.append(
            f"| {row['setting']} | {row['peer']} | {speeds} | {steps} | {interval} | "
            f"{row['pairs']} | {verdict} | {losses} |"
        )
    return "\n".join(lines)


def machine() -> dict:
    """What the figures depend on."""
    import torch

    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    commit = None
    with suppress(OSError):  # git may be missing
        command = ["git", "rev-parse", "HEAD"]
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    # not in every torch
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    names = ("avx2", "avx512_f", "avx512_bf16", "amx_bf16")
    return {
        "cpu": model[1] if model else platform.processor(),
        "cores": os.cpu_count(),
        "vectors": [name for name in names if capabilities.get(name)],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "packages": ENVIRONMENTS,
    }


def parser_of_flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--setup", type=Path, metavar="DIR", help="make the peers' environments in DIR"
    )
    parser.add_argument(
        "--environments",
        nargs="+",
        choices=ENVIRONMENTS,
        default=list(ENVIRONMENTS),
        help="those that --setup makes",
    )
    parser.add_argument(
        "--peers",
        type=lambda path: Path(path).resolve(),
        metavar="DIR",
        help="where they are: measure",
    )
    parser.add_argument("--pairs", type=int, help="that count: 21 in turns, 7 of whole runs")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--against", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--threads", type=int, default=2, help="of all processes of a run together")
    parser.add_argument(
        "--quiet",
        type=float,
        default=0.2,
        help="cores that others may use on average during a counted run",
    )
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread, CPU seconds instead of elapsed ones, every pair counts",
    )
    parser.add_argument(
        "--window",
        type=float,
        metavar="SECONDS",
        help="for one window on a GPU: begin no run later, count every pair, and leave out a peer "
        "that fails",
    )
    parser.add_argument("--out", type=Path, help="JSON of every run")
    return parser


def exit_cleanly(*_: object) -> None:
    """Exit on SIGTERM so that the temporary folder, 9 GB in /dev/shm, is removed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # timeout(1) sends it twice
    sys.exit(128 + signal.SIGTERM)


def main() -> None:
    signal.signal(signal.SIGTERM, exit_cleanly)
    parser = parser_of_flags()
    args = parser.parse_args()
    if not (args.setup or args.peers):
        parser.error("give --setup DIR, --peers DIR or both")
    if args.setup:
        setup(args.setup, args.environments)
    if args.peers:
        measure(args)


def shared_memory() -> Path | None:
    """The file system in memory, where it takes an 8B model's layers (9 GB) and their tokens."""
    folder = Path("/dev/shm")
    is_large = folder.is_dir() and shutil.disk_usage(folder).free > 16 << 30
    return folder if is_large else None


def rule_of(args: argparse.Namespace) -> Rule:
    """Which runs count as pairs, by which speed, and until when runs begin."""
    pairs = args.pairs or (ratio_rule.PAIRS if args.window else 3 * TURNS)
    if args.window:
        until = time.monotonic() + args.window
        return Rule(pairs, math.inf, "tokens_per_second", until, True)
    if args.cpu_time:
        return Rule(pairs, math.inf, "tokens_per_cpu_second")
    return Rule(pairs, args.quiet, "tokens_per_second")


def peers_without_row(
    settings: dict[str, Work], against: Sequence[str], rows: Sequence[dict]
) -> list[str]:
    """Peers that take the work of a setting and have no row of it, once for each such setting."""
    asked = {
        (name, peer) for name, work in settings.items() for peer in applicable_peers(against, work)
    }
    return sorted(peer for _, peer in asked - {(row["setting"], row["peer"]) for row in rows})


def measure(args: argparse.Namespace) -> None:
    """Run all pairs, keep every run in --out, and print the table."""
    threads, rule = 1 if args.cpu_time else args.threads, rule_of(args)
    settings = {
        name: replace(SETTINGS[name], threads=max(1, threads // SETTINGS[name].processes))
        for name in args.settings
    }
    document = {
        "started": datetime.now().isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "machine": machine(),
        "rule": str(rule),
        "settings": {name: asdict(work) for name, work in settings.items()},
        "rows": [],
        "runs": [],
    }
    is_large = any(map(on_a_gpu, settings.values()))
    with tempfile.TemporaryDirectory(dir=shared_memory() if is_large else None) as folder:
        for name, work in settings.items():
            method = rounds if on_a_gpu(work) else turns
            for _ in method(
                name, work, args.against, args.peers, Path(folder) / "start", rule, document["runs"]
            ):
                document["rows"] = summary(document["runs"], settings, rule)
                if args.out:  # after every run: an interrupted measurement keeps what it has
                    args.out.parent.mkdir(parents=True, exist_ok=True)
                    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document["rows"]))
    missing = peers_without_row(settings, args.against, document["rows"])
    if args.window and missing:
        sys.exit(f"no row of {', '.join(missing)}")


if __name__ == "__main__":
    main()
