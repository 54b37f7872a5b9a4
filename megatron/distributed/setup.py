"""The one place that knows launchers and chooses the device: torchrun, plain srun and a single
process all start the same way.

    launch = read_launch()
    device, backend = choose_device(launch, config.distributed)
    set_determinism(device, config.model.deterministic_mode)
    connect(launch, backend, config.distributed.distributed_timeout_minutes, fingerprint)
    groups = make_groups(layout, kv_heads)
    ...
    disconnect()
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable, Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

from megatron.config.groups import DistributedConfig
from megatron.distributed.groups import Groups, Layout, build_groups, one_process
from megatron.distributed.peers import PEERS
from megatron.distributed.rendezvous import FAREWELL, Launch, LaunchError, meet

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # names of mallopt's parameters in glibc's malloc.h
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SRUN = (
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)
# what torch asks for, from cuBLAS's notes on reproducibility
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_REPEATABLE = (":4096:8", ":16:8")
# below the ports that Linux gives to outgoing connections, so that ours is rarely taken
SRUN_PORTS = range(20000, 30000)

# axes whose collectives a layer's computation waits for
URGENT = frozenset(("tp", "cp", "cp_heads", "cp_ring", "shard", "shard_gather", "ep", "etp"))
# A message of a pipeline has a layer's time to arrive, and takes multiprocessors from that layer. A
# channel of NCCL is one block of threads and carries 14 GB/s over a network by its own reckoning
# (NCCL_P2P_PER_CHANNEL_NET_BW): four fill 400 Gb/s.
MESSAGE_CTAS = 4

Environment = Mapping[str, str]


def read_launch(environment: Environment = os.environ) -> Launch:
    """This process as its launcher numbered it. Raises LaunchError for variables that are missing
    or contradict each other.
    """
    if dist.is_initialized():
        rank = dist.get_rank()
        world = dist.get_world_size()
        return Launch(rank, world, rank, world, "torch.distributed")
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _checked(
            _torchrun_launch(environment), "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE"
        )
    if "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        return _checked(
            _srun_launch(environment),
            "SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE",
        )
    return Launch()


def rough_launch() -> Launch:
    """`read_launch`, or for the text of an error what can be known: a rank that its launcher's
    variables do not give counts as 0.
    """
    try:
        return read_launch()
    except LaunchError:
        rank, local = (
            next(
                (int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()),
                0,
            )
            for names in (("RANK", "SLURM_PROCID"), ("LOCAL_RANK", "SLURM_LOCALID"))
        )
        return Launch(rank=rank, local_rank=local)


def slurm_job() -> str:
    """Slurm's number of this job, which a requeue keeps; empty outside of Slurm."""
    return os.environ.get("SLURM_JOB_ID", "")


def _torchrun_launch(environment: Environment) -> Launch:
    """Of torchrun's variables, whoever has set them."""
    alone = environment.get("WORLD_SIZE") == "1"
    missing = [name for name in (TORCHRUN[:2] if alone else TORCHRUN) if not environment.get(name)]
    if missing:
        given = ", ".join(
            f"{name}={environment[name]}" for name in TORCHRUN if environment.get(name)
        )
        raise LaunchError(
            f"the environment has {given}, but not {', '.join(missing)}: start with torchrun "
            "or srun, which set them all, set them "
            "yourself, or unset RANK and WORLD_SIZE to start a single process"
        )
    return Launch(
        rank=_number(environment, "RANK"),
        world_size=_number(environment, "WORLD_SIZE"),
        local_rank=_number(environment, "LOCAL_RANK", 0),
        local_size=_number(environment, "LOCAL_WORLD_SIZE", 1),
        launcher="torchrun" if "TORCHELASTIC_RUN_ID" in environment else "environment",
        address=environment.get("MASTER_ADDR"),
        port=_port(environment),
        job=environment.get("TORCHELASTIC_RUN_ID", "environment"),
        agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _srun_launch(environment: Environment) -> Launch:
    """Of the variables that srun sets for each task of a step."""
    missing = [name for name in SRUN if not environment.get(name)]
    if missing:
        raise LaunchError(
            f"srun's variables are incomplete: {', '.join(missing)} not set; start with "
            "srun, without an --export that drops variables, or with torchrun"
        )
    tasks = expand_counts(environment["SLURM_STEP_TASKS_PER_NODE"])
    node = _number(environment, "SLURM_NODEID")
    if node >= len(tasks):
        raise LaunchError(
            f"SLURM_NODEID={node}, but "
            f"SLURM_STEP_TASKS_PER_NODE={environment['SLURM_STEP_TASKS_PER_NODE']} is of "
            f"{len(tasks)} nodes; start with srun, which sets both"
        )
    job, step, restart = (
        _number(environment, name, 0)
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    )
    derived = SRUN_PORTS[(job + 1009 * step + 2003 * restart) % len(SRUN_PORTS)]
    return Launch(
        rank=_number(environment, "SLURM_PROCID"),
        world_size=_number(environment, "SLURM_STEP_NUM_TASKS"),
        local_rank=_number(environment, "SLURM_LOCALID"),
        local_size=tasks[node],
        launcher="srun",
        address=environment.get("MASTER_ADDR")
        or expand_hosts(environment["SLURM_STEP_NODELIST"])[0],
        port=_port(environment) or derived,
        job=f"srun/{job}.{step}.{restart}",
    )


def rank_hosts(launch: Launch, environment: Environment = os.environ) -> list[str]:
    """The host of each rank, as srun places them in blocks; empty where another launcher did.
    Raises LaunchError.
    """
    if launch.launcher != "srun":
        return []
    hosts = expand_hosts(environment["SLURM_STEP_NODELIST"])
    tasks = expand_counts(environment["SLURM_STEP_TASKS_PER_NODE"])
    return [host for host, count in zip(hosts, tasks) for _ in range(count)]


def _checked(launch: Launch, names: str) -> Launch:
    values = f"{launch.rank}, {launch.world_size}, {launch.local_rank}, {launch.local_size}"
    faults = [
        (launch.rank >= launch.world_size, "a rank must be below the number of ranks"),
        (
            launch.local_rank >= launch.local_size,
            "a local rank must be below the number of ranks of its host",
        ),
        (launch.local_size > launch.world_size, "a host cannot have more ranks than the job"),
    ]
    for wrong, why in faults:
        if wrong:
            raise LaunchError(
                f"{names} are {values}: {why}; start with torchrun or srun, or set them right"
            )
    return launch


def _number(environment: Environment, name: str, default: int | None = None) -> int:
    text = environment.get(name) or default
    if not re.fullmatch(r"\d+", str(text)):
        raise LaunchError(
            f"{name}={text}: expected a whole number from 0 on; start with torchrun or srun, "
            "which set it, or set it right"
        )
    return int(text)


def _port(environment: Environment) -> int | None:
    if not environment.get("MASTER_PORT"):
        return None
    port = _number(environment, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise LaunchError(f"MASTER_PORT={port}: a port is a number from 1 to 65535")
    return port


def expand_counts(text: str) -> list[int]:
    """Slurm's counts for each node: `2(x3),1` is [2, 2, 2, 1]. Raises LaunchError."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE={text}: expected counts such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_hosts(text: str) -> list[str]:
    """Slurm's host lists: `gpu[08-10,12],login1` is gpu08 gpu09 gpu10 gpu12 login1; several
    brackets in a name multiply. Raises LaunchError.
    """
    name = r"(?:[^\s,\[\]]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
    if not re.fullmatch(f"{name}(?:,{name})*", text):
        raise LaunchError(
            f"SLURM_STEP_NODELIST={text}: expected host names such as gpu[01-04],login1; set "
            "MASTER_ADDR to rank 0's host"
        )
    hosts: list[str] = []
    for item in re.findall(name, text):
        found = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
            ends = (
                [plain]
                if plain
                else [number for part in ranges.split(",") for number in _expand_range(part)]
            )
            found = [host + end for host in found for end in ends]
        hosts += found
    return hosts


def _expand_range(part: str) -> list[str]:
    """`08-10` is 08 09 10."""
    first, _, last = part.partition("-")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]


def choose_device(launch: Launch, config: DistributedConfig) -> tuple[torch.device, str]:
    """This rank's device, made current, and the backend of its collectives: a GPU and nccl where
    there is one, else the CPU and gloo.

    On a CPU the ranks of a host share its cores, and freed memory stays with the process. Raises
    LaunchError when nccl lacks a GPU for a rank.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backend = config.distributed_backend
    if backend == "auto":
        backend = "nccl" if gpus else "gloo"
    if backend == "nccl" and not gpus:
        raise LaunchError(
            f"rank {launch.rank}: --distributed-backend nccl needs a GPU, and torch finds "
            "none here; start where there is one, or give --distributed-backend gloo"
        )
    # --gpus-per-task shows each task its own
    if (
        backend == "nccl"
        and launch.local_size > gpus
        and not (gpus == 1 and launch.launcher == "srun")
    ):
        raise LaunchError(
            f"rank {launch.rank}: {launch.local_size} ranks were started on this host, which "
            f"shows {gpus} GPU{'s' * (gpus > 1)}, and "
            f"nccl needs one for each; start at most {gpus} on each host, or share GPUs with "
            "--distributed-backend gloo"
        )
    if gpus:
        device = torch.device("cuda", launch.local_rank % gpus)
        torch.cuda.set_device(device)
        return device, backend
    if launch.launcher in ("torchrun", "environment", "srun"):
        share_cores(launch)
    keep_freed_memory()
    return torch.device("cpu"), backend


def set_determinism(
    device: torch.device, wanted: bool, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Hold torch's CUDA kernels to equal bits for equal inputs, or let them be. Without it the
    fused attention is cuDNN's where that can compute it, and its backward pass adds atomically;
    with it an operation that has no deterministic form raises. To be called before the GPU's first
    product of matrices. Raises LaunchError.
    """
    if device.type != "cuda":
        return
    if (
        wanted
        and (found := environment.setdefault(CUBLAS, CUBLAS_REPEATABLE[0])) not in CUBLAS_REPEATABLE
    ):
        raise LaunchError(
            f"{CUBLAS}={found}: products repeat their bits only with "
            f"{' or '.join(CUBLAS_REPEATABLE)}; unset it, or give --no-deterministic-mode"
        )
    torch.use_deterministic_algorithms(wanted)
    # every buffer is written before it is read
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if not wanted:
        # by itself torch takes cuDNN's attention last (never run on a GPU)
        first = int(SDPBackend.CUDNN_ATTENTION)  # type: ignore[call-overload]
        others = [each for each in torch._C._get_sdp_priority_order() if each != first]
        torch._C._set_sdp_priority_order([first, *others])


def share_cores(launch: Launch, environment: Environment = os.environ) -> None:
    """Give each of several ranks on a host its part of the cores, unless the user has set
    OMP_NUM_THREADS: torch would give all cores to each, and torchrun sets 1, which leaves most of
    them idle.
    """
    if launch.local_size == 1 or (
        "OMP_NUM_THREADS" in environment and not _torchrun_set_threads(launch, environment)
    ):
        return
    mine = _number(environment, "SLURM_CPUS_PER_TASK", 0) if launch.launcher == "srun" else 0
    torch.set_num_threads(max(1, mine or len(os.sched_getaffinity(0)) // launch.local_size))


def _torchrun_set_threads(launch: Launch, environment: Environment) -> bool:
    """Whether OMP_NUM_THREADS=1 is torchrun's doing: then the environment that torchrun, our
    parent, was itself started with lacks it.
    """
    if launch.launcher != "torchrun" or environment["OMP_NUM_THREADS"] != "1":
        return False
    try:
        return not any(
            entry.startswith(b"OMP_NUM_THREADS=")
            for entry in Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        )
    except OSError:
        return False


def connect(
    launch: Launch, backend: str, timeout_minutes: float, fingerprint: dict[str, Any]
) -> None:
    """Meet the other ranks and initialise torch.distributed, whose collectives then have the same
    timeout. Nothing for one process.

    `fingerprint` (nested, JSON values) must be equal on every rank. Raises LaunchError on every
    rank when one does not arrive, differs or was placed wrongly.
    """
    if launch.world_size == 1 or dist.is_initialized():
        return
    # Messages between stages, which torch warns about, have communicators of their own direction
    # (Groups.channel).
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device else ""
    store = meet(launch, 60 * timeout_minutes, {**fingerprint, "backend": backend}, gpu)
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
        interface = {"nccl": "NCCL_SOCKET_IFNAME", "gloo": "GLOO_SOCKET_IFNAME"}[backend]
        raise LaunchError(
            f"rank {launch.rank}: all {launch.world_size} ranks arrived, but {backend} could "
            "not connect them; look for an earlier error "
            f"of another rank; if there is none, set {interface} to the network interface "
            f"that joins the hosts. It said: {str(error).splitlines()[0]}"
        ) from None
    PEERS.start(
        store, launch.rank, launch.world_size, "torchrun" if launch.agent_store else "rank 0"
    )


def disconnect() -> None:
    """Leave a job that has ended well: all ranks call it. The store's host stays until the others
    have left, or for a few seconds.
    """
    if not dist.is_initialized():
        return
    rank = dist.get_rank()
    world = dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    PEERS.stop()
    dist.destroy_process_group()
    try:
        left = store.add("left", 1)
        until = time.monotonic() + FAREWELL
        while rank == 0 and left < world and time.monotonic() < until:
            time.sleep(0.02)
            left = store.add("left", 0)
    except RuntimeError:
        pass  # the host left before us: it has waited long enough


def make_groups(layout: Layout, kv_heads: int | None, **options: Any) -> Groups:
    """This rank's groups, on the default backend and with its timeout; the collective call of every
    rank, after `connect`. The options are those of `build_groups`.
    """
    if layout.world == 1:
        return one_process()
    assert dist.get_world_size() == layout.world
    nccl = dist.get_backend() == "nccl"
    kind = torch.device("cuda" if nccl else "cpu")
    # torch would fall back to its own default
    timeout = dist.group.WORLD._get_backend(kind).options._timeout

    def new_group(ranks: tuple[int, ...], group_desc: str) -> Any:
        if group_desc == "world":
            return dist.group.WORLD  # which torch has made already
        options = nccl_options(dist.ProcessGroupNCCL.Options, group_desc, timeout) if nccl else None
        return dist.new_group(ranks, timeout=timeout, pg_options=options, group_desc=group_desc)

    return build_groups(layout, dist.get_rank(), new_group, kv_heads, **options)


def nccl_options(make: Callable[..., Any], group_desc: str, timeout: timedelta) -> Any:
    """NCCL's options for a group of these uses (`build_groups`): ahead of computation where
    computation waits for it, and few blocks of threads for a pipeline's messages. `make`: the class
    of the options, which CPU builds of torch lack.
    """
    uses = group_desc.split()
    options = make(is_high_priority_stream=not URGENT.isdisjoint(uses))
    options._timeout = timeout  # torch warns where it is not the group's
    if uses[0].startswith("channel"):
        options.config.max_ctas = MESSAGE_CTAS
    return options


def keep_freed_memory() -> bool:
    """Stop glibc from returning freed tensors to the system and faulting their pages in again each
    step; whether it could be asked to.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # another C library has none
    most = 2**31 - 1  # bytes; a C int
    return (
        mallopt is not None
        and bool(mallopt(M_MMAP_THRESHOLD, most))
        and bool(mallopt(M_TRIM_THRESHOLD, most))
    )
