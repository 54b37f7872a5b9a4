"""A real Slurm on this machine: munged, slurmctld and several slurmd (virtual nodes), all state in
one folder, no file of the system touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from debian_packages import install

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue")

CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SlurmdTimeout=5
KillWait=15
MinJobAge=3600
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_slurm() -> str | None:
    """Why no Slurm can run here; None when it can, after installing Debian's packages where they
    lack and may be installed.
    """
    lacking = [name for name in PROGRAMS if program(name) is None]
    if os.geteuid() != 0:
        return "the Slurm daemons of these tests need root"
    if not lacking:
        return None
    reason = install(*PACKAGES)
    return reason and f"Slurm is not installed ({', '.join(lacking)} not found): {reason}"


def program(name: str) -> str | None:
    """Path of a program; daemons lie in sbin, which is not on everybody's PATH."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def wait_for(
    condition: Callable[[], object], seconds: float, what: str | Callable[[], str]
) -> object:
    """The first true value of `condition`, asked again and again. AssertionError naming `what`
    after `seconds`.
    """
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, (
            f"waited {seconds:g} s in vain for: {what() if callable(what) else what}"
        )
        time.sleep(0.1)
    return value


def free_ports(count: int) -> list[int]:
    """TCP ports that no process listens on now."""
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Cluster:
    """`names` are the virtual nodes; `environment` is what clients of this cluster need."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.names = folder, [f"n{i}" for i in range(nodes)]
        self.configuration = folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.configuration)}
        self._daemons: dict[str, subprocess.Popen] = {}
        controller_port, *ports = free_ports(1 + nodes)
        lines = [
            (
                f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 "
                f"Port={port} CPUs=8 RealMemory=2000"
            )
            for name, port in zip(self.names, ports, strict=True)
        ]
        for name in ("state", "munge", *(f"spool.{name}" for name in self.names)):
            (folder / name).mkdir(parents=True)
        (folder / "munge").chmod(0o755)
        self.configuration.write_text(
            CONFIGURATION.format(
                folder=folder, controller_port=controller_port, nodes="\n".join(lines)
            )
        )
        (folder / "cgroup.conf").touch()

    def start(self) -> None:
        """All daemons, and wait until every node is idle."""
        munge = self.folder / "munge"
        create = [program("mungekey"), "--create", f"--keyfile={munge}/key"]
        subprocess.run(create, check=True, capture_output=True)
        places = {"socket": "socket", "key-file": "key", "pid-file": "pid"}
        places |= {"log-file": "log", "seed-file": "seed"}
        flags = [f"--{flag}={munge}/{file}" for flag, file in places.items()]
        self._start("munged", "--foreground", "--force", *flags)
        wait_for((munge / "socket").exists, 10, "munged's socket")
        self.start_controller()
        for name in self.names:
            self.start_node(name)
        wait_for(
            lambda: self.idle_nodes() == set(self.names),
            30,
            lambda: f"idle nodes; now {self.run('sinfo', '-N', '-l')}\n{self.logs()}",
        )

    def start_controller(self) -> None:
        self._start("slurmctld", "-D", "-f", self.environment["SLURM_CONF"])

    def start_node(self, name: str) -> None:
        self._start("slurmd", "-D", "-N", name, "-f", self.environment["SLURM_CONF"], key=name)

    def kill(self, daemon: str) -> None:
        """kill -9 of `slurmctld`, or of the slurmd of a node."""
        process = self._daemons.pop(daemon)
        process.kill()
        process.wait()

    def stop(self) -> None:
        """End every job, then every daemon."""
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self._ask("scancel", "--user=root")
            wait_for(lambda: not self.run("squeue", "-h"), 20, "the last job to end")
        for process in reversed(self._daemons.values()):
            process.send_signal(signal.SIGTERM)
        for process in self._daemons.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._daemons.clear()

    def _ask(
        self, name: str, *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A Slurm command."""
        return subprocess.run(
            [program(name), *arguments],
            cwd=cwd,
            env=env or self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def run(
        self, name: str, *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> str:
        """Standard output of a Slurm command, which must succeed."""
        done = self._ask(name, *arguments, cwd=cwd, env=env)
        assert done.returncode == 0, f"{name} {' '.join(arguments)}: {done.stderr}{done.stdout}"
        return done.stdout

    def idle_nodes(self) -> set[str]:
        return set(self._ask("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").stdout.split())

    def job(self, job: int) -> dict[str, str]:
        """The controller's record of a job: JobState, Restarts, StartTime, ...; empty while the
        controller is away.
        """
        fields = self._ask("scontrol", "show", "job", "-o", str(job)).stdout.split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def nodes_of(self, job: int) -> list[str]:
        return self.run("scontrol", "show", "hostnames", self.job(job)["NodeList"]).split()

    def logs(self) -> str:
        """The ends of all daemons' logs."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def _start(self, name: str, *arguments: str, key: str | None = None) -> None:
        with open(self.folder / f"{key or name}.out", "ab") as output:
            self._daemons[key or name] = subprocess.Popen(
                [program(name), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
