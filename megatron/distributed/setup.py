"""Chooses the device and connects the ranks; torchrun, srun, mpirun and a single process all start
the same way.

    launch = read_launch()
    device, backend = choose_device(launch, config.distributed)
    set_determinism(device, config.model.deterministic_mode)
    connect(launch, backend, config.distributed.distributed_timeout_minutes, fingerprint)
    groups = make_groups(layout, **group_options(config))
    ...
    disconnect()
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

from megatron.config.groups import DistributedConfig
from megatron.distributed.collectives import connect_channels
from megatron.distributed.groups import Groups, Layout, build_groups, one_process
from megatron.distributed.launchers import Environment, Launch, LaunchError, launch_of, number
from megatron.distributed.peers import PEERS, wait_for_count
from megatron.distributed.rendezvous import ERROR_GRACE_S, meet

logger = logging.getLogger(__name__)

CLOSING_S = 150.0  # in which rank 0 closes its trackers; wandb takes up to two minutes
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # names of mallopt's parameters in glibc's malloc.h
# from cuBLAS's notes on reproducibility
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_REPEATABLE = (":4096:8", ":16:8")
# axes on whose collectives a layer waits, those of experts without their prefix
URGENT = frozenset("tp cp cp_heads cp_ring tp_cp shard shard_gather ep etp".split())
# A message of a pipeline has a layer's time to arrive, and takes multiprocessors from that layer. A
# channel of NCCL is one thread block and is assumed to carry 14 GB/s over a network
# (NCCL_P2P_PER_CHANNEL_NET_BW): four fill 400 Gb/s.
MESSAGE_CTAS = 4


def read_launch(environment: Environment = os.environ) -> Launch:
    """This process as its launcher numbered it. Raises LaunchError when variables are missing or
    contradict each other.

    DeepSpeed's launcher and many wrappers do not set the number of ranks of this host: it is then
    its number of GPUs, or without a GPU all ranks.
    """
    if dist.is_initialized():
        rank = dist.get_rank()
        world = dist.get_world_size()
        return Launch(rank, world, rank, world, "torch.distributed")
    launch = launch_of(environment)
    if launch.local_size:
        return launch
    most = min(launch.world_size, count_gpus() or launch.world_size)
    return replace(launch, local_size=max(launch.local_rank + 1, most))


def count_gpus() -> int:
    """Number of GPUs that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_device(launch: Launch, config: DistributedConfig) -> tuple[torch.device, str]:
    """This rank's device, made current, and the backend of its collectives: a GPU and nccl if there
    is one, else the CPU and gloo.

    On a CPU the ranks of a host share its cores, and the process keeps freed memory. Raises
    LaunchError when nccl lacks a GPU for a rank.
    """
    gpus = count_gpus()
    backend = config.distributed_backend
    if backend == "auto":
        backend = "nccl" if gpus else "gloo"
    # --gpus-per-task and wrappers that set CUDA_VISIBLE_DEVICES show each process its own GPU
    has_own = gpus == 1 and launch.launcher != "torchrun"
    if backend == "nccl" and not has_own and gpus < launch.local_size:
        raise LaunchError(
            f"rank {launch.rank}: --distributed-backend nccl needs a GPU for each of the "
            f"{launch.local_size} ranks of this host, and torch finds {gpus}; start at most one "
            "rank for each GPU, or share GPUs and CPUs with --distributed-backend gloo"
        )
    if gpus:
        device = torch.device("cuda", launch.local_rank % gpus)
        torch.cuda.set_device(device)
        return device, backend
    if launch.launcher != "torch.distributed":
        share_cores(launch)
    keep_freed_memory()
    return torch.device("cpu"), backend


def warn_of_idle_gpus(launch: Launch, device: torch.device) -> None:
    """Warn when this host has more GPUs than ranks."""
    gpus = count_gpus() if device.type == "cuda" else 0
    if launch.local_size < gpus:
        logger.warning(
            f"uses {launch.local_size} of the {gpus} GPUs that this host shows: one rank uses one "
            f"GPU; start {gpus} ranks on each host (torchrun --nproc-per-node={gpus}, srun "
            f"--ntasks-per-node={gpus}), or set CUDA_VISIBLE_DEVICES to the GPUs to be used"
        )


def set_determinism(
    device: torch.device, wanted: bool, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Switch torch's deterministic CUDA kernels on or off: with them an operation without a
    deterministic kernel raises; without them attention prefers cuDNN, whose backward pass adds
    atomically. Must be called before the first GEMM. Raises LaunchError.
    """
    if device.type != "cuda":
        return
    if wanted:
        found = environment.setdefault(CUBLAS, CUBLAS_REPEATABLE[0])
        if found not in CUBLAS_REPEATABLE:
            raise LaunchError(
                f"{CUBLAS}={found}: GEMMs are deterministic only with "
                f"{' or '.join(CUBLAS_REPEATABLE)}; unset it, or give --no-deterministic-mode"
            )
    torch.use_deterministic_algorithms(wanted)
    # not needed: every buffer is written before it is read
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if not wanted:
        # torch's default order has cuDNN last (never run on a GPU)
        first = int(SDPBackend.CUDNN_ATTENTION)  # type: ignore[call-overload]
        others = [each for each in torch._C._get_sdp_priority_order() if each != first]
        torch._C._set_sdp_priority_order([first, *others])


def share_cores(launch: Launch, environment: Environment = os.environ) -> None:
    """Divide the cores of a host between its ranks, unless the user has set OMP_NUM_THREADS. torch
    would give all cores to each rank, and torchrun one.
    """
    is_set = "OMP_NUM_THREADS" in environment and not _torchrun_set_threads(launch, environment)
    if launch.local_size == 1 or is_set:
        return
    mine = number(environment, "SLURM_CPUS_PER_TASK", 0) if launch.launcher == "srun" else 0
    torch.set_num_threads(max(1, mine or len(os.sched_getaffinity(0)) // launch.local_size))


def _torchrun_set_threads(launch: Launch, environment: Environment) -> bool:
    """Whether torchrun, the parent process, set OMP_NUM_THREADS=1: its own environment lacks it."""
    if launch.launcher != "torchrun" or environment["OMP_NUM_THREADS"] != "1":
        return False
    try:
        entries = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in entries)


def connect(
    launch: Launch, backend: str, timeout_minutes: float, fingerprint: dict[str, Any]
) -> None:
    """Meet the other ranks and initialize torch.distributed with the same timeout; nothing to do
    for one process.

    `fingerprint` (nested JSON values) must be equal on every rank. Raises LaunchError on every rank
    when one does not arrive or differs, or when NCCL finds two ranks on one GPU.
    """
    if launch.world_size == 1 or dist.is_initialized():
        return
    # torch warns about messages between stages, which have separate communicators by direction
    # (Groups.channel)
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    store = meet(launch, 60 * timeout_minutes, {**fingerprint, "backend": backend})
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(minutes=timeout_minutes),
            device_id=device,
        )
    except RuntimeError as error:
        # NCCL's comes late, such as two ranks that were given one GPU
        cause = str(error).rpartition("Last error:\n")[2].partition("\n")[0]
        interface = {"nccl": "NCCL_SOCKET_IFNAME", "gloo": "GLOO_SOCKET_IFNAME"}[backend]
        raise LaunchError(
            f"rank {launch.rank}: all {launch.world_size} ranks arrived, but {backend} could "
            "not connect them; look for an earlier error "
            f"of another rank; if there is none, set {interface} to the network interface "
            f"that joins the hosts ({cause})"
        ) from None
    holder = "torchrun" if launch.agent_store else "rank 0"
    PEERS.start(store, launch.rank, launch.world_size, holder)


def disconnect() -> None:
    """Disconnect all ranks at the end of a job, once each has closed its files: a launcher kills
    the others when one ends with an error code. The store's host waits until the others have
    disconnected, for a few seconds at most.
    """
    if not dist.is_initialized():
        return
    store = dist.distributed_c10d._get_default_store()
    world, patience = dist.get_world_size(), ERROR_GRACE_S if dist.get_rank() == 0 else 0
    wait_for_count(store, "closed", world, CLOSING_S)
    PEERS.stop()
    dist.destroy_process_group()
    wait_for_count(store, "left", world, patience)


def make_groups(layout: Layout, **options: Any) -> Groups:
    """This rank's groups, on the default backend and with its timeout. A collective call of all
    ranks, after `connect`; the options are those of `build_groups`.
    """
    if layout.world == 1:
        return one_process()
    assert dist.get_world_size() == layout.world
    nccl = dist.get_backend() == "nccl"
    kind = torch.device("cuda" if nccl else "cpu")
    # otherwise torch uses its default
    timeout = dist.group.WORLD._get_backend(kind).options._timeout

    def new_group(ranks: tuple[int, ...], group_desc: str) -> Any:
        if group_desc == "world":
            return dist.group.WORLD  # which torch has made already
        options = nccl_options(dist.ProcessGroupNCCL.Options, group_desc, timeout) if nccl else None
        return dist.new_group(ranks, timeout=timeout, pg_options=options, group_desc=group_desc)

    groups = build_groups(layout, dist.get_rank(), new_group, **options)
    if nccl and layout.pp > 1:
        connect_channels(groups, torch.device("cuda", torch.cuda.current_device()))
    return groups


def nccl_options(make: Callable[..., Any], group_desc: str, timeout: timedelta) -> Any:
    """NCCL's options for a group with these uses (`build_groups`): a high-priority stream when
    computation waits for it, and few thread blocks for a pipeline's messages. `make`: the class of
    the options, which CPU builds of torch lack.
    """
    uses = [use.removeprefix("expert_") for use in group_desc.split()]
    options = make(is_high_priority_stream=not URGENT.isdisjoint(uses))
    options._timeout = timeout  # torch warns when it is not the group's
    if uses[0].startswith("channel"):
        options.config.max_ctas = MESSAGE_CTAS
    return options


def keep_freed_memory() -> None:
    """Stop glibc from returning freed tensors to the system, which would fault their pages in again
    each step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # another C library has none
    if mallopt is not None:
        most = 2**31 - 1  # bytes; a C int
        mallopt(M_MMAP_THRESHOLD, most)
        mallopt(M_TRIM_THRESHOLD, most)
