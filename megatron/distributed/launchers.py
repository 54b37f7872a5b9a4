"""Launchers (torchrun, srun, mpirun and others) by the environment variables that they set. Imports
no torch: the rank must be known before torch is imported.

The variables of every launcher are translated to torchrun's, which one function reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from megatron.config.errors import UserError

Environment = Mapping[str, str]
NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
VARIABLES = (*NEEDED, "LOCAL_WORLD_SIZE")  # torchrun's
# below the ports that Linux gives to outgoing connections, so that it is rarely taken
SRUN_PORTS = range(20000, 30000)
MPI_PORT = "29500"  # where mpirun's ranks meet without MASTER_PORT; torch's default, too


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
# In the order in which they are asked. srun comes after the launchers that may have started their
# daemons with it, whose variables their ranks inherit; and before the bare PMI and PMIx variables,
# which srun and others set as well.
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
    _prefixed("a PMIx launcher", "PMIX"),
)


def launch_of(environment: Environment) -> Launch:
    """The launch that these variables describe. Raises LaunchError when variables are missing or
    contradict each other, and when one of several processes cannot join the others.
    """
    given = {name: environment[name] for name in VARIABLES if environment.get(name)}
    launcher = None if len(given) == len(VARIABLES) else _find_launcher(environment)
    try:
        found = {} if launcher is None else _as_torchrun(launcher, environment)
    except LaunchError:
        if "RANK" not in given:
            raise
        found = {}
    numbering = given.keys() & {"RANK", "WORLD_SIZE"}
    is_same = all(given[name] == found.get(name) for name in numbering)
    if "RANK" in given:
        # set by torchrun, DeepSpeed's launcher or a wrapper of the launcher that was found
        name = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "environment"
        given["JOB"] = environment.get("TORCHELASTIC_RUN_ID", name)
        is_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return _parse({**found, **given} if is_same else given, name, is_agent)
    if launcher is None:
        return _parse(given, "environment") if numbering else Launch()
    if "WORLD_SIZE" in found and not is_same:
        raise LaunchError(
            f"WORLD_SIZE={given['WORLD_SIZE']}, but {launcher.name} gives a world size of "
            f"{found['WORLD_SIZE']}: start as many processes as WORLD_SIZE, or unset WORLD_SIZE"
        )
    return _parse(found, launcher.name)


def rough_launch(environment: Environment = os.environ) -> Launch:
    """`launch_of`, or for error messages a guess from incomplete variables."""

    def guess(*names: str) -> int:
        text = _first(environment, " ".join(names))
        return int(text) if text.isdecimal() else 0

    try:
        return launch_of(environment)
    except LaunchError:
        _, _, ranks, _, local_ranks, _ = zip(*LAUNCHERS)
        return Launch(guess("RANK", *ranks), local_rank=guess("LOCAL_RANK", *local_ranks))


def slurm_job(environment: Environment = os.environ) -> str:
    """Slurm's job id, which a requeue keeps; empty outside of Slurm."""
    return environment.get("SLURM_JOB_ID", "")


def _find_launcher(environment: Environment) -> Launcher | None:
    """The first launcher whose size is not 1, else the first one. PMIx may set no size."""
    started = [launcher for launcher in LAUNCHERS if _is_started_by(launcher, environment)]
    sizes = [(each, _first(environment, each.size)) for each in started]
    # srun without its count is an error; others without a size yield to one that has it
    several = [each for each, size in sizes if size != "1" and (size or each is SRUN)]
    return next(iter(several or started), None)


def _is_started_by(launcher: Launcher, environment: Environment) -> bool:
    if launcher is SRUN:  # the shell of a batch script is task 0 of no step
        task = environment.get(SRUN.rank, ""), environment.get(SRUN.size, "")
        return task not in {("", ""), ("0", ""), ("", "1")}
    return launcher.mark in environment


def _first(environment: Environment, names: str) -> str:
    """The first of these variables that is set; empty when none is."""
    return next((environment[name] for name in names.split() if environment.get(name)), "")


def _as_torchrun(launcher: Launcher, environment: Environment) -> dict[str, str]:
    """The variables of a launcher under torchrun's names; those that are not set are left out.
    Raises LaunchError.
    """
    for name in " ".join(launcher[2:]).split():
        number(environment, name, 0)  # so that an error names the launcher's own variable
    names = {
        "RANK": launcher.rank,
        "WORLD_SIZE": launcher.size,
        "LOCAL_RANK": f"{launcher.local_rank} LOCAL_RANK",
        "LOCAL_WORLD_SIZE": f"{launcher.local_size} LOCAL_WORLD_SIZE",
        "MASTER_ADDR": "MASTER_ADDR",
        "MASTER_PORT": "MASTER_PORT",
    }
    found = {name: _first(environment, theirs) for name, theirs in names.items()}
    if launcher is SRUN:
        found |= _of_step(environment)
    else:
        is_one_host = found["LOCAL_WORLD_SIZE"] == found["WORLD_SIZE"]
        found["MASTER_ADDR"] = found["MASTER_ADDR"] or ("localhost" if is_one_host else "")
        found["MASTER_PORT"] = found["MASTER_PORT"] or MPI_PORT
        job = environment.get("PBS_JOBID") or slurm_job(environment)
        found["JOB"] = f"{launcher.name}/{job}"
    return {name: value for name, value in found.items() if value}


def _of_step(environment: Environment) -> dict[str, str]:
    """Where the ranks of an srun step meet, and the number of those on this node."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    job, step, restart = (number(environment, name, 0) for name in names)
    port = SRUN_PORTS[(job + 1009 * step + 2003 * restart) % len(SRUN_PORTS)]
    found = {
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
        "JOB": f"srun/{job}.{step}.{restart}",
    }
    node, tasks = environment.get("SLURM_NODEID"), environment.get("SLURM_STEP_TASKS_PER_NODE")
    if node and tasks:
        counts = expand_counts(tasks)
        index = number(environment, "SLURM_NODEID")
        if index >= len(counts):
            raise LaunchError(
                f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE={tasks} is of {len(counts)} "
                "nodes; start with srun, which sets both"
            )
        found["LOCAL_WORLD_SIZE"] = str(counts[index])
    if environment.get("SLURM_STEP_NODELIST") and not environment.get("MASTER_ADDR"):
        found["MASTER_ADDR"] = expand_hosts(environment["SLURM_STEP_NODELIST"])[0]
    return found


def _parse(values: Environment, launcher: str, agent_store: bool = False) -> Launch:
    """The launch that torchrun's variables describe. Raises LaunchError."""
    given = ", ".join(f"{name}={values[name]}" for name in VARIABLES if name in values)
    origin = f"{given or 'no rank'} (launcher: {launcher})"
    if "RANK" in values and values.get("WORLD_SIZE") == "1":
        if number(values, "RANK") > 0:
            raise LaunchError(
                f"{origin}: a rank must be below the number of ranks; set WORLD_SIZE to the "
                "number of processes, or unset RANK and WORLD_SIZE"
            )
        return Launch(launcher=launcher)
    # srun's own count of this node's ranks: a guess could be wrong without an error
    needed = VARIABLES if launcher == SRUN.name else NEEDED
    missing = [name for name in needed if name not in values]
    if missing:
        raise LaunchError(
            f"{origin}, but {', '.join(missing)} not set: set them for every process (MASTER_ADDR: "
            "the host of rank 0, MASTER_PORT: a free port there, LOCAL_RANK: the number of the "
            "process on its host), start with torchrun, or with srun without an --export that "
            "drops variables, or unset RANK and WORLD_SIZE to start a single process"
        )
    launch = Launch(
        rank=number(values, "RANK"),
        world_size=number(values, "WORLD_SIZE"),
        local_rank=number(values, "LOCAL_RANK"),
        local_size=number(values, "LOCAL_WORLD_SIZE", 0),
        launcher=launcher,
        address=values["MASTER_ADDR"],
        port=number(values, "MASTER_PORT"),
        job=values["JOB"],
        agent_store=agent_store,
    )
    local_size = launch.local_size or launch.world_size
    fits = launch.rank < launch.world_size and launch.local_rank < local_size <= launch.world_size
    if not fits or not 1 <= launch.port <= 65535:
        raise LaunchError(
            f"{origin}: a rank must be below the number of ranks, a host cannot have more ranks "
            "than the job, and a port is a number from 1 to 65535; start with torchrun or srun, "
            "or correct them"
        )
    return launch


def number(environment: Environment, name: str, default: int | None = None) -> int:
    """The integer value of a variable. Raises LaunchError."""
    text = environment.get(name) or str(default)
    if not text.isdecimal():
        raise LaunchError(
            f"{name}={text}: must be a non-negative integer; start with torchrun or srun, "
            "which set it, or correct it"
        )
    return int(text)


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
        # plain text and the content of brackets in turn
        parts = re.split(r"[\[\]]", item)
        choices = [_expand_ranges(part) if k % 2 else [part] for k, part in enumerate(parts)]
        hosts += map("".join, product(*choices))
    return hosts


def _expand_ranges(text: str) -> list[str]:
    """`08-10,12` is 08 09 10 12."""
    found: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        found += [str(each).zfill(len(first)) for each in numbers]
    return found
