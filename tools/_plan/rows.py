"""Published rows of throughput and memory as flags of pretrain_gpt.py, for the planner to be held
against.

A row names the sizes of a model, a layout and what was measured. What it leaves out is taken from
what its source specifies of all of its rows (SOURCES), else from the default alongside it.
"""

from __future__ import annotations

import csv
import itertools
import re
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.tools._plan.program import OURS, Program

from megatron.config.errors import UserError
from megatron.config.recompute import MODULES
from megatron.model.stages import balance

Row = dict[str, str]


@dataclass(frozen=True)
class Publisher:
    """What a source specifies of all of its runs: the flags of this program that stand for them,
    and in what the program that ran them differs.
    """

    flags: tuple[str, ...] = ()
    program: Program = OURS
    gpu: str = "H100-80-SXM"  # where a row names none
    # whether the largest number of parameters of a stage is the smallest that there can be
    balanced_stages: bool = False


TRANSFORMER_ENGINE = Program(generation=3, transformer_engine=True)
# by the beginning of a row's `source`; the longest that fits counts
SOURCES = {
    # TransformerEngine with cuDNN's attention; tensor-parallel collectives alongside products
    "NVIDIA/": Publisher(("--grad-reduce-in-bf16", "--cp-comm-type", "p2p"), TRANSFORMER_ENGINE),
    "NVIDIA-NeMo/": Publisher(("--grad-reduce-in-bf16",), TRANSFORMER_ENGINE),
    "megatron-lm": Publisher(("--grad-reduce-in-bf16",), TRANSFORMER_ENGINE),
    # Megatron-DeepSpeed of 2022: nothing overlaps; kernels that are not fused, and the state of
    # random generators that is saved around each recomputed layer
    "VIA-Research/vTrain": Publisher(
        ("--no-overlap-grad-reduce", "--grad-reduce-in-bf16"),
        Program(launches=4.0, serial=True),
    ),
    # Gradients in 16 bits. The rest is what the code of github.com/Aleph-Alpha/scaling shows.
    "Aleph-Alpha/": Publisher(
        ("--main-grads-dtype", "bf16"),
        Program(whole_logits=True, gathered_inputs=True, activated_gate=True, serial=True),
        gpu="A100-80-SXM",
        balanced_stages=True,
    ),
    # FSDP reduces in the compute precision; attention of the first generation, in Triton
    "mosaicml/": Publisher(("--grad-reduce-in-bf16",), Program(generation=1)),
}
GPUS = {
    "H100-80-SXM": "h100",
    "H200-141-SXM": "h200",
    "A100-80-SXM": "a100-80",
    "A100-40-SXM": "a100-40",
    "B200": "b200",
}
ZERO = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3, "fsdp-zero2": 2, "fsdp-zero3": 3}


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a file of comma-separated values. Lines that begin with # are remarks; where none
    of the others names the columns, a remark does.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    heads = [line.lstrip("# ") for line in lines if line.lstrip("# ").startswith("source,")]
    if not heads:
        raise UserError(f"{path}: no line names the columns: source,model,layers,hidden,...")
    body = [line for line in lines if line.strip() and not line.startswith("#")]
    body = [line for line in body if line != heads[0]]
    rows = list(csv.DictReader([heads[0], *body]))
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise UserError(f"{path}: row {number} has other columns than {heads[0]}")
    return rows


def number(row: Row, column: str, default: float | None = None) -> float:
    """The number in a column. Raises UserError where there is none and no default."""
    text = (row.get(column) or "").strip()
    if not text and default is not None:
        return default
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{column} is {text!r}, not a number") from None


def hardware_name(row: Row) -> str:
    """The device file of a row."""
    gpu = (row.get("gpu") or "").strip() or source_of(row).gpu
    for prefix, name in GPUS.items():
        if gpu.startswith(prefix):
            return name
    raise UserError(f"gpu {gpu}: no file of its constants; there are {', '.join(GPUS)}")


# Rows of one model in one layout are kept out together, whatever their source and precision.
DIGESTED = ("layers", "hidden", "seq", "tp", "cp", "pp", "vp", "dp", "micro_batch")
KEPT_OUT = 3  # one of that many


def is_kept_out(row: Row) -> bool:
    """Whether a published row is kept out of the fit of the constants that are shipped."""
    text = "|".join((row.get(column) or "").strip() for column in DIGESTED)
    return zlib.crc32(text.encode()) % KEPT_OUT == 0


def network(row: Row) -> float | None:
    """GB/s of the network for each GPU where a row's note names the node's Gb/s."""
    found = re.search(r"([\d.]+) Gb/s[^;,]*a node", row.get("note") or "")
    return None if found is None else float(found[1]) / 8 / 8


def source_of(row: Row) -> Publisher:
    """What is known of a row's source."""
    matches = [prefix for prefix in SOURCES if row["source"].startswith(prefix)]
    return SOURCES[max(matches, key=len)] if matches else Publisher()


def program_of(row: Row) -> Program:
    """The program that ran a row, with the kernels that the row names."""
    program = source_of(row).program
    if "attention not fused" in (row.get("note") or ""):
        program = replace(program, fused_softmax=True)
    unfused = "unfused RMSNorm" in (row.get("kernels") or "")
    return replace(program, normed=True) if unfused else program


def row_flags(row: Row) -> tuple[list[str], int]:
    """(flags, ranks) of a row."""
    sizes = {
        "--num-layers": "layers",
        "--hidden-size": "hidden",
        "--num-attention-heads": "heads",
        "--ffn-hidden-size": "ffn",
        "--seq-length": "seq",
        "--vocab-size": "vocab",
        "--tensor-model-parallel-size": "tp",
        "--pipeline-model-parallel-size": "pp",
    }
    flags = []
    for flag, column in sizes.items():
        flags += [flag, str(int(number(row, column)))]
    world = int(number(row, "gpus"))
    cp = int(number(row, "cp", 1))
    virtual = int(number(row, "vp", 1))
    replicas = world / (int(number(row, "tp")) * int(number(row, "pp")) * cp)
    micro = int(number(row, "micro_batch", 1))
    batch = int(number(row, "global_batch", replicas * micro))
    flags += ["--micro-batch-size", str(micro), "--global-batch-size", str(batch)]
    if cp > 1:
        flags += ["--context-parallel-size", str(cp)]
    stages = int(number(row, "pp")) * virtual
    if virtual > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(virtual)]
    if stages > 1 and source_of(row).balanced_stages:
        flags += ["--pipeline-model-parallel-layout", _balanced_stages(row, stages)]
    elif stages > 1 and number(row, "layers") % stages:
        flags += ["--pipeline-model-parallel-layout", "auto"]
    flags += _head_flags(row) + _latent_flags(row) + _expert_flags(row)
    return flags + _kind_flags(row, replicas * cp), world


def _balanced_stages(row: Row, stages: int) -> str:
    """`Ett|ttt|tL`: that many stages, of which the largest number of parameters is the least."""
    hidden, heads = int(number(row, "hidden")), int(number(row, "heads"))
    groups, layers = int(number(row, "kv_heads", heads)), int(number(row, "layers"))
    matrix = int(number(row, "vocab")) * hidden
    attention = 2 * hidden * hidden * (heads + groups) // heads
    matrices = 3 if (row.get("mlp") or _mlp_of(row)) == "swiglu" else 2
    layer = attention + hidden * (matrices * int(number(row, "ffn")) + 2)
    parameters = (matrix, *[layer] * layers, matrix)
    letters = iter("E" + "t" * layers + "L")
    sizes = balance(parameters, parameters, stages)
    return "|".join("".join(itertools.islice(letters, size)) for size in sizes)


EXPERTS = {
    "experts": "--num-experts",
    "topk": "--moe-router-topk",
    "expert_ffn": "--moe-ffn-hidden-size",
    "shared_ffn": "--moe-shared-expert-intermediate-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
}


LATENT = {
    "q_lora": "--q-lora-rank",
    "kv_lora": "--kv-lora-rank",
    "qk_head": "--qk-head-dim",
    "qk_pos": "--qk-pos-emb-head-dim",
    "v_head": "--v-head-dim",
}


def _sizes(row: Row, columns: dict[str, str]) -> list[str]:
    """The flags of these columns, where they are set."""
    named = ((flag, column) for column, flag in columns.items() if (row.get(column) or "").strip())
    return [word for flag, column in named for word in (flag, str(int(number(row, column))))]


def _expert_flags(row: Row) -> list[str]:
    """Of experts; they are balanced in published runs."""
    if not (row.get("experts") or "").strip():
        return []
    flags = ["--moe-router-force-load-balancing", *_sizes(row, EXPERTS)]
    dense, layers = int(number(row, "dense_layers", 0)), int(number(row, "layers"))
    if dense:  # the first ones
        flags += ["--moe-layer-freq", f"[0]*{dense}+[1]*{layers - dense}"]
    return flags


def _latent_flags(row: Row) -> list[str]:
    """Of latent attention, with norms of what is narrow."""
    if not (row.get("kv_lora") or "").strip():
        return []
    return ["--multi-latent-attention", "--qk-layernorm", *_sizes(row, LATENT)]


def _head_flags(row: Row) -> list[str]:
    """Of the attention heads."""
    flags = []
    if (head := row.get("head_dim")) and head.strip():
        flags += ["--kv-channels", head]
    groups = int(number(row, "kv_heads", number(row, "heads")))
    if groups != int(number(row, "heads")):
        flags += ["--group-query-attention", "--num-query-groups", str(groups)]
    return flags


def _kind_flags(row: Row, replicas: float) -> list[str]:
    """Of what a row has as text."""
    gated = (row.get("mlp") or _mlp_of(row)) == "swiglu"
    note = row.get("note") or ""
    flags = ["--bf16", "--disable-bias-linear", "--attention-dropout", "0", "--hidden-dropout", "0"]
    if gated:
        flags += ["--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope"]
    if not ("tied" in note and "untied" not in note) and gated:
        flags.append("--untie-embeddings-and-output-weights")
    if row.get("sequence_parallel") == "yes" or (
        "sequence_parallel" not in row and number(row, "tp") > 1
    ):
        if number(row, "tp") > 1:
            flags.append("--sequence-parallel")
    if "fp8" in (row.get("precision") or ""):
        flags += ["--fp8-format", "hybrid", "--fp8-min-width", "1"]
    stage = ZERO.get((row.get("sharding") or "").strip(), 1)
    if stage and replicas > 1:
        flags += ["--zero-stage", str(stage)]
    recompute = row.get("recompute") or ""
    if "full" in recompute:
        flags += ["--recompute-granularity", "full"]
    elif "selective" in recompute:
        flags += ["--recompute-granularity", "selective"]
        modules = [word for word in recompute.split() if word in MODULES]
        flags += ["--recompute-modules", *modules] if modules else []
    flags += source_of(row).flags
    if "attention not fused" in note:
        flags += ["--attention-backend", "plain"]
    flags += _kernel_flags(row)
    return _that_act(row, flags, replicas)


def _kernel_flags(row: Row) -> list[str]:
    """Of the kernels that a row names: what is not fused keeps what torch's operators keep."""
    kernels = row.get("kernels") or ""
    if not kernels:
        return []
    flags = ["--attention-backend", "sdpa"]
    for operator in ("rotary", "activation", "dropout", "cross-entropy"):
        flags += [f"--{operator}-backend", "torch"]
    return flags + (["--norm-backend", "torch"] if "unfused RMSNorm" in kernels else [])


def _that_act(row: Row, flags: list[str], replicas: float) -> list[str]:
    """The flags without those that have no effect on the row's layout, which are refused."""
    if replicas == 1:
        drop = ("--grad-reduce-in-bf16", "--no-overlap-grad-reduce")
        flags = [flag for flag in flags if flag not in drop]
    if number(row, "cp", 1) == 1 and "--cp-comm-type" in flags:
        at = flags.index("--cp-comm-type")
        del flags[at : at + 2]
    return flags


def _mlp_of(row: Row) -> str:
    """Where a row does not specify it: an ffn width that is not four times the hidden size is
    gated.
    """
    return "gelu" if number(row, "ffn") == 4 * number(row, "hidden") else "swiglu"


def measured_step(row: Row) -> float | None:
    """Seconds of a step that was measured."""
    if (row.get("step_s") or "").strip():
        return number(row, "step_s")
    if (row.get("tokens_per_s_per_gpu") or "").strip() and (row.get("global_batch") or "").strip():
        tokens = number(row, "global_batch") * number(row, "seq")
        return tokens / number(row, "tokens_per_s_per_gpu") / number(row, "gpus")
    return None


def fits_of(row: Row) -> bool | None:
    """Whether a layout fitted, where the row specifies it."""
    return {"fits": True, "oom": False}.get((row.get("result") or "").strip())
