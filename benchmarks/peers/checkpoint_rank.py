"""One rank of a job whose state is saved by one system on request: ours, raw pwrite,
safetensors, torch.save, torch DCP, DeepSpeed.

    python checkpoint_rank.py SYSTEM HIDDEN     # with the variables of torchrun

Run by benchmarks/checkpoint.py. A line of standard input {"folder": ...} names an empty folder
to save into (null: none, to be ready); the answer is a line `TURN {"begin", "free", "end", "bytes",
...}`: clock times in seconds at which the save began, from which on the state may change again, and
at which all that this rank has written was fsynced; and those bytes.

Every rank holds an equal share of rows of fp32 weights and both of Adam's moments of a GPT whose
size grows with the ranks. Settings are the best that each library documents: DCP plans once
(`enable_plan_caching`), its asynchronous saves keep their staging buffers, those of `process` in
shared memory. DCP and ours fsync their files themselves; after safetensors, torch.save, DeepSpeed
and raw writes each rank fsyncs its files.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

PIECE = 16 << 20
LAYERS, VOCAB = 2, 8  # for each rank: layers, and the vocabulary by the hidden size
# into a new folder; returns when the state may change, if that is before the end
Save = Callable[[Path], float | None]


def shapes(hidden: int, ranks: int) -> dict[str, tuple[int, ...]]:
    """Of every logical tensor of the whole job."""
    layer = {f"attention.{part}.weight": (hidden, hidden) for part in ("q", "k", "v", "proj")}
    layer |= {
        "mlp.up.weight": (4 * hidden, hidden),
        "mlp.down.weight": (hidden, 4 * hidden),
        "attention_norm.weight": (hidden,),
        "mlp_norm.weight": (hidden,),
    }
    names = {
        f"layers.{i}.{name}": shape for i in range(LAYERS * ranks) for name, shape in layer.items()
    }
    names["embedding.word.weight"] = (VOCAB * hidden * ranks, hidden)
    return {
        f"{prefix}{name}": shape
        for prefix in ("", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")
        for name, shape in names.items()
    }


def own_rows(shape: tuple[int, ...], rank: int, ranks: int) -> tuple[int, ...]:
    return shape[0] // ranks, *shape[1:]


def raw_bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def sync_files(paths: list[Path]) -> None:
    """Files, then the folders that they are in."""
    for path in [*paths, *{path.parent for path in paths}]:
        sync(path)


# ---- systems: each returns how it saves `tensors` ------------------------------------------------


def memcpy(tensors: dict[str, Tensor], rank: int, ranks: int) -> Save:
    buffers = {name: tensor.clone() for name, tensor in tensors.items()}

    def save(folder: Path) -> None:
        for name, tensor in tensors.items():
            buffers[name].copy_(tensor)

    return save


def raw(tensors: dict[str, Tensor], rank: int, ranks: int, threads: int = 1) -> Save:
    """A file for each thread, which holds every `threads`-th tensor."""

    def write(folder: Path, thread: int) -> None:
        file, position = (
            os.open(folder / f"rank-{rank}-{thread}", os.O_WRONLY | os.O_CREAT | os.O_EXCL),
            0,
        )
        for data in map(raw_bytes, list(tensors.values())[thread::threads]):
            for start in range(0, len(data), PIECE):
                position += os.pwrite(file, data[start : start + PIECE], position)
        os.fsync(file)
        os.close(file)

    def save(folder: Path) -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(write, [folder] * threads, range(threads)))
        sync(folder)

    return save


def safetensors_file(tensors: dict[str, Tensor], rank: int, ranks: int) -> Save:
    from safetensors.torch import save_file

    def save(folder: Path) -> None:
        save_file(tensors, folder / f"rank-{rank}.safetensors")
        sync_files([folder / f"rank-{rank}.safetensors"])

    return save


def torch_save(tensors: dict[str, Tensor], rank: int, ranks: int) -> Save:
    def save(folder: Path) -> None:
        torch.save(tensors, folder / f"rank-{rank}.pt")
        sync_files([folder / f"rank-{rank}.pt"])

    return save


def dcp(
    tensors: dict[str, Tensor],
    rank: int,
    ranks: int,
    threads: int = 1,
    background: str | None = None,
) -> Save:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (ranks,))
    state = {
        name: DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)
        for name, tensor in tensors.items()
    }
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    # the others need CUDA
    stager = DefaultStager(StagingOptions(False, background == "process", False, False))

    def save(folder: Path) -> float | None:
        writer = dcp.FileSystemWriter(folder, thread_count=threads)
        if background is None:
            dcp.save(state, storage_writer=writer, planner=planner)
            return None
        kind = (
            AsyncCheckpointerType.PROCESS
            if background == "process"
            else AsyncCheckpointerType.THREAD
        )
        future = dcp.async_save(
            state,
            storage_writer=writer,
            planner=planner,
            async_checkpointer_type=kind,
            async_stager=stager,
        )
        free = time.perf_counter()
        future.result()
        return free

    return save


def ours(
    tensors: dict[str, Tensor],
    rank: int,
    ranks: int,
    background: bool = False,
    threads: int | None = None,
) -> Save:
    torch.set_num_threads(threads or torch.get_num_threads())  # it writes as many shards at once
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from megatron.checkpoint.manager import CheckpointManager, staging_bytes
    from megatron.checkpoint.ranks import Ranks
    from megatron.distributed.groups import Axis
    from megatron.model.spec import Box

    pairs = []
    for name, tensor in tensors.items():
        rows, *rest = tensor.shape
        pairs.append(
            (
                Box(name, (rows * ranks, *rest), (rows * rank, *(0 for _ in rest)), (rows, *rest)),
                tensor,
            )
        )
    together = Ranks(Axis("world", rank, tuple(range(ranks)), dist.group.WORLD))

    @cache
    def the_saver() -> CheckpointManager:  # with its host memory
        return CheckpointManager("", together, staging_bytes(pairs, None) if background else None)

    def save(folder: Path) -> float:
        saver = the_saver()
        # the memory is that of the first save, the folder a new one
        saver.root = Path(folder)
        saver.save(1, pairs, {"iteration": 1})
        free = time.perf_counter()
        if not saver.finalize():
            raise RuntimeError("the save failed")
        return free

    return save


def deepspeed_zero1(tensors: dict[str, Tensor], rank: int, ranks: int) -> Save:
    """bf16 weights, fp32 masters and moments of the same model: 14 bytes a parameter, where the
    others write 12.
    """
    import deepspeed

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.ParameterList(
                [
                    torch.zeros(shape)
                    for name, shape in shapes(HIDDEN, ranks).items()
                    if "optimizer." not in name
                ]
            )

        def forward(self) -> Tensor:
            return sum(weight.sum() for weight in self.weights)

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    engine.backward(engine())
    engine.step()  # makes the moments
    engine.optimizer.zero_grad()

    def save(folder: Path) -> None:
        engine.save_checkpoint(str(folder), tag="step")
        dist.barrier()
        mine = list((folder / "step").glob(f"*zero_pp_rank_{rank}_*"))
        sync_files(mine + [path for path in (folder / "step").glob("mp_rank_*") if rank == 0])

    return save


SYSTEMS = {
    "memcpy": memcpy,
    "raw pwrite": raw,
    "ours": ours,
    "ours, async": lambda *args: ours(*args, background=True),
    "ours, 1 thread": lambda *args: ours(*args, threads=1),
    "raw pwrite, 2 threads": lambda *args: raw(*args, threads=2),
    "safetensors": safetensors_file,
    "torch.save": torch_save,
    "DCP": dcp,
    "DCP, 2 threads": lambda *args: dcp(*args, threads=2),
    "DCP, async thread": lambda *args: dcp(*args, background="thread"),
    "DCP, async process": lambda *args: dcp(*args, background="process"),
    "DeepSpeed ZeRO-1": deepspeed_zero1,
}


def own_bytes(folder: Path, rank: int) -> int:
    """Of the files that this rank has written; what the first writes for all of them counts for
    it.
    """
    ours = [
        json.loads(path.read_bytes())["manifest"]["shards"]
        for path in folder.glob("iter_*/MANIFEST.json")
    ]
    shards = (Path(each["file"]).stem for each in sum(ours, []) if each["rank"] == rank)
    own = (
        *shards,
        f"rank-{rank}-",
        f"rank-{rank}.",
        f"__{rank}_",
        f"bf16_zero_pp_rank_{rank}_",
        f"zero_pp_rank_{rank}_",
    )
    others = ("rank-", "shard-", "__", "bf16_zero", "zero_pp")
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(
        path.stat().st_size
        for path in files
        if path.name.startswith(own) or (rank == 0 and not path.name.startswith(others))
    )


def main(system: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))  # as in training
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    tensors = {}
    if "DeepSpeed" not in system:
        for number, (name, shape) in enumerate(shapes(HIDDEN, ranks).items()):
            generator = torch.Generator().manual_seed(number * ranks + rank)
            tensors[name] = torch.randn(own_rows(shape, rank, ranks), generator=generator)
        dist.init_process_group("gloo")
    save = SYSTEMS[system](tensors, rank, ranks)
    held = sum(math.prod(tensor.shape) * 4 for tensor in tensors.values())
    for line in sys.stdin:
        if (to := json.loads(line)["folder"]) is None:
            print("TURN {}", file=out, flush=True)
            continue
        folder = Path(to)
        dist.barrier()
        begin = time.perf_counter()
        free = save(folder)
        end = time.perf_counter()
        answer = {"begin": begin, "free": free or end, "end": end, "state": held}
        dist.barrier()
        print(
            "TURN " + json.dumps(answer | {"bytes": own_bytes(folder, rank)}), file=out, flush=True
        )


if __name__ == "__main__":
    HIDDEN = int(sys.argv[2])
    main(sys.argv[1])
