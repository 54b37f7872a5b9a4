"""Launchers (torchrun, srun, mpirun and others) by the environment variables that they set. Imports
no torch: the rank must be known before torch is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from megatron.config.errors import UserError

Environment = Mapping[str, str]
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# below the ports that Linux gives to outgoing connections, so that it is rarely taken
SRUN_PORTS = range(20000, 30000)
MPI_PORT = 29500  # where mpirun's ranks meet without MASTER_PORT; torch's default, too


class LaunchError(UserError):
    """The processes of a job were started incorrectly, or could not find each other."""


@dataclass(frozen=True)
class Launch:
    """This process as its launcher numbered it. `address` and `port`: where the ranks meet, None
    for one process.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    """Ranks on this host; 0 when no variable gives it."""
    launcher: str = "one process"
    address: str | None = None
    port: int | None = None
    job: str = ""
    """Distinguishes jobs (and attempts of a job) that use the same address and port by mistake."""
    agent_store: bool = False
    """torchrun's agent hosts the store."""


class Launcher(NamedTuple):
    """The variables of one launcher; of several names, with spaces between, the first that is set
    counts. `mark`: a variable that this launcher sets and no other does.
    """

    name: str
    mark: str
    rank: str
    size: str
    local_rank: str
    local_size: str = ""


def _prefixed(name: str, prefix: str) -> Launcher:
    parts = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return Launcher(name, f"{prefix}_RANK", *(f"{prefix}_{part}" for part in parts))


SRUN = Launcher("srun", "", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
SRUN_VARIABLES = (*SRUN[2:5], "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
PMIX = _prefixed("a PMIx launcher", "PMIX")
# In the order in which they are asked. srun comes after the launchers that may have started their
# daemons with it, whose variables their ranks inherit; and before the bare PMI variables, which
# srun sets as well.
LAUNCHERS = (
    _prefixed("mpirun (Open MPI)", "OMPI_COMM_WORLD"),
    _prefixed("mpirun (MVAPICH)", "MV2_COMM_WORLD"),
    _prefixed("mpirun (MVAPICH)", "MVP_COMM_WORLD"),
    _prefixed("jsrun", "JSM_NAMESPACE"),
    Launcher("flux run", "FLUX_TASK_RANK", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    Launcher(
        "mpiexec (PALS)",
        "PALS_RANKID",
        "PALS_RANKID",
        "PALS_SIZE PMI_SIZE",
        "PALS_LOCAL_RANKID PMI_LOCAL_RANK",
        "PALS_LOCAL_SIZE PMI_LOCAL_SIZE",
    ),
    Launcher(
        "mpiexec (Hydra)",
        "MPI_LOCALRANKID",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
    ),
    SRUN,
    _prefixed("a PMI launcher", "PMI"),
    PMIX,
)


def launch_of(environment: Environment) -> Launch:
    """The launch that these variables describe. Raises LaunchError when variables are missing or
    contradict each other, and when one of several processes cannot join the others.
    """
    if environment.get("RANK"):
        names = "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE"
        return _checked(_explicit_launch(environment), names)
    launch = _launchers_launch(environment)
    if environment.get("WORLD_SIZE"):
        if launch == Launch():
            raise _incomplete(environment)
        size = number(environment, "WORLD_SIZE")
        if size != launch.world_size:
            raise LaunchError(
                f"WORLD_SIZE={size}, but {launch.launcher} started {launch.world_size} "
                f"process{'es' * (launch.world_size != 1)}: start as many as WORLD_SIZE, or unset "
                "WORLD_SIZE"
            )
    return launch


def rough_launch(environment: Environment = os.environ) -> Launch:
    """`launch_of`, or for error messages a guess from incomplete variables."""

    def guess(*names: str) -> int:
        values = (environment.get(name, "") for name in " ".join(names).split())
        return next((int(value) for value in values if value.isdecimal()), 0)

    try:
        return launch_of(environment)
    except LaunchError:
        _, _, ranks, _, local_ranks, _ = zip(*LAUNCHERS)
        return Launch(guess("RANK", *ranks), local_rank=guess("LOCAL_RANK", *local_ranks))


def _explicit_launch(environment: Environment) -> Launch:
    """The launch by RANK and related variables, set by torchrun, DeepSpeed's launcher or a
    wrapper. Variables of a launcher that gives the same rank fill in for missing ones.
    """
    rank = number(environment, "RANK")
    fields: dict[str, Any] = {
        "world_size": _first(environment, "WORLD_SIZE"),
        "local_rank": _first(environment, "LOCAL_RANK"),
        "local_size": _first(environment, "LOCAL_WORLD_SIZE"),
        "address": environment.get("MASTER_ADDR") or None,
        "port": _port(environment),
    }
    given = {name: value for name, value in fields.items() if value is not None}
    below = _same_rank(environment, rank)
    if below is not None and given.get("world_size") in (None, below.world_size):
        given = vars(below) | given
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "environment"
    if given.get("world_size") == 1:
        return Launch(rank, 1, 0, 1, launcher)
    if not given.keys() >= fields.keys() - {"local_size"}:
        raise _incomplete(environment)
    return Launch(
        rank=rank,
        world_size=given["world_size"],
        local_rank=given["local_rank"],
        local_size=given.get("local_size", 0),
        launcher=launcher,
        address=given["address"],
        port=given["port"],
        job=environment.get("TORCHELASTIC_RUN_ID", "environment"),
        agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _same_rank(environment: Environment, rank: int) -> Launch | None:
    """The launch that a launcher's variables describe, if it gives this rank."""
    try:
        launch = _launchers_launch(environment)
    except LaunchError:
        return None
    return launch if launch.rank == rank and launch != Launch() else None


def _incomplete(environment: Environment) -> LaunchError:
    given = [f"{name}={environment[name]}" for name in RANK_VARIABLES if environment.get(name)]
    missing = [name for name in RANK_VARIABLES if not environment.get(name)]
    return LaunchError(
        f"the environment has {', '.join(given)}, but not {', '.join(missing)}: start with "
        "torchrun, srun or mpirun, which set what they need, set them yourself, or unset RANK and "
        "WORLD_SIZE to start a single process"
    )


def _launchers_launch(environment: Environment) -> Launch:
    """The launch by variables that launchers set: of the first one that started several processes,
    else of a single process.
    """
    found: list[Launch] = []
    for launcher in LAUNCHERS:
        is_srun = launcher is SRUN
        is_set = _by_srun(environment) if is_srun else launcher.mark in environment
        # other launchers may set PMIx's variables as well
        if not is_set or (launcher is PMIX and found):
            continue
        found.append(_srun_launch(environment) if is_srun else _mpi_launch(launcher, environment))
        if found[-1].world_size > 1:
            return found[-1]
    return found[0] if found else Launch()


def _by_srun(environment: Environment) -> bool:
    """Whether srun started this process; the shell of a batch script is task 0 of no step."""
    rank, size = environment.get(SRUN.rank, ""), environment.get(SRUN.size, "")
    return bool(rank and size) or rank not in ("", "0") or size not in ("", "1")


def _mpi_launch(launcher: Launcher, environment: Environment) -> Launch:
    """The launch by the variables of an MPI launcher. Raises LaunchError."""

    def refused(problem: str) -> LaunchError:
        rank = environment.get(launcher.rank, "")
        return LaunchError(
            f"{launcher.name} started this process ({launcher.rank}={rank}){problem}"
        )

    rank, size = _first(environment, launcher.rank), _first(environment, launcher.size)
    if rank is None or size is None:
        raise refused(
            ", but no variable gives the number of processes: it would train by itself; set "
            f"{', '.join(RANK_VARIABLES)} of each process, or start with torchrun or srun"
        )
    if size == 1:
        return Launch(rank, 1, 0, 1, launcher.name)
    local_rank = _first(environment, f"{launcher.local_rank} LOCAL_RANK")
    local_size = _first(environment, f"{launcher.local_size} LOCAL_WORLD_SIZE") or 0
    if local_rank is None:
        raise refused(
            f" as one of {size}, and no variable gives its number on its host, which selects its "
            "GPU: set LOCAL_RANK of each process"
        )
    address = environment.get("MASTER_ADDR") or ("localhost" if local_size == size else None)
    if address is None:
        raise refused(
            f" as one of {size}, and MASTER_ADDR is not set: export MASTER_ADDR, the host of rank "
            "0, and MASTER_PORT, a free port there; for example "
            'export MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE") MASTER_PORT=29500'
        )
    job = f"{launcher.name}/{environment.get('PBS_JOBID') or slurm_job(environment)}"
    port = _port(environment) or MPI_PORT
    launch = Launch(rank, size, local_rank, local_size, launcher.name, address, port, job)
    return _checked(launch, ", ".join(names.split()[0] for names in launcher[2:] if names))


def _first(environment: Environment, names: str) -> int | None:
    """The number of the first of these variables that is set."""
    name = next((name for name in names.split() if environment.get(name)), None)
    return None if name is None else number(environment, name)


def _srun_launch(environment: Environment) -> Launch:
    """The launch by the variables that srun sets for each task of a step."""
    missing = [name for name in SRUN_VARIABLES if not environment.get(name)]
    if missing:
        raise LaunchError(
            f"srun's variables are incomplete: {', '.join(missing)} not set; start with "
            "srun, without an --export that drops variables, or with torchrun"
        )
    tasks = expand_counts(environment["SLURM_STEP_TASKS_PER_NODE"])
    node = number(environment, "SLURM_NODEID")
    if node >= len(tasks):
        raise LaunchError(
            f"SLURM_NODEID={node}, but "
            f"SLURM_STEP_TASKS_PER_NODE={environment['SLURM_STEP_TASKS_PER_NODE']} is of "
            f"{len(tasks)} nodes; start with srun, which sets both"
        )
    job, step, restart = (
        number(environment, name, 0)
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    )
    derived = SRUN_PORTS[(job + 1009 * step + 2003 * restart) % len(SRUN_PORTS)]
    launch = Launch(
        rank=number(environment, SRUN.rank),
        world_size=number(environment, SRUN.size),
        local_rank=number(environment, SRUN.local_rank),
        local_size=tasks[node],
        launcher="srun",
        address=environment.get("MASTER_ADDR")
        or expand_hosts(environment["SLURM_STEP_NODELIST"])[0],
        port=_port(environment) or derived,
        job=f"srun/{job}.{step}.{restart}",
    )
    return _checked(
        launch, "SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE"
    )


def slurm_job(environment: Environment = os.environ) -> str:
    """Slurm's job id, which a requeue keeps; empty outside of Slurm."""
    return environment.get("SLURM_JOB_ID", "")


def _checked(launch: Launch, names: str) -> Launch:
    values = f"{launch.rank}, {launch.world_size}, {launch.local_rank}, {launch.local_size}"
    why = ""
    if launch.rank >= launch.world_size:
        why = "a rank must be below the number of ranks"
    elif 0 < launch.local_size <= launch.local_rank:
        why = "a local rank must be below the number of ranks of its host"
    elif launch.local_size > launch.world_size:
        why = "a host cannot have more ranks than the job"
    if why:
        raise LaunchError(
            f"{names} are {values}: {why}; start with torchrun or srun, or correct them"
        )
    return launch


def number(environment: Environment, name: str, default: int | None = None) -> int:
    """The integer value of a variable. Raises LaunchError."""
    text = environment.get(name) or default
    if not re.fullmatch(r"\d+", str(text)):
        raise LaunchError(
            f"{name}={text}: must be a non-negative integer; start with torchrun or srun, "
            "which set it, or correct it"
        )
    return int(text)


def _port(environment: Environment) -> int | None:
    if not environment.get("MASTER_PORT"):
        return None
    port = number(environment, "MASTER_PORT")
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
        ends = [
            [plain]
            if plain
            else [each for part in ranges.split(",") for each in _expand_range(part)]
            for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item)
        ]
        hosts += map("".join, product(*ends))
    return hosts


def _expand_range(part: str) -> list[str]:
    """`08-10` is 08 09 10."""
    first, _, last = part.partition("-")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
