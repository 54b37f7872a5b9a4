"""Jobs of scripts/train.sbatch: a tiny model on 2 nodes x 2 ranks over Gloo, a pipeline stage on
each node.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster import Cluster, free_ports, wait_for

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS = 100
SAVE_INTERVAL = 20
MODEL = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
--global-batch-size 8 --vocab-size 127 --no-bf16
--train-iters {ITERATIONS} --save-interval {SAVE_INTERVAL} --log-interval 1
--eval-iters 0""".split()
TWO_BY_TWO = "--nodes=2 --ntasks-per-node=2 --cpus-per-task=1 --gpus-per-node=0 --mem=0".split()
LAYOUT = "--micro-batch-size 1 --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


def program(path: Path, script: str) -> Path:
    """An executable bash script."""
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)
    return path


def launch_environment(folder: Path, ranks: int) -> dict[str, str]:
    """What scripts/launch.sh finds on the only node of a job."""
    return {
        **os.environ,
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURMD_NODENAME": "n0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
        "RANKS_PER_NODE": str(ranks),
        "PYTHON": sys.executable,
        "FAILURES": str(folder / "failures"),
        "TMPDIR": str(folder),
    }


class Job:
    """A submitted job; `save` is its run folder."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        launcher: str,
        flags: tuple[str, ...] = (),
        slurm: tuple[str, ...] = (),
        **settings: str,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.cluster, self.save, self.output = cluster, folder / "run", folder / "output.txt"
        environment = {
            **cluster.environment,
            "LAUNCHER": launcher,
            "SAVE": str(self.save),
            "TOKENS": "",
            "PYTHON": sys.executable,
            "LAYOUT": LAYOUT,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
            **settings,
        }
        slurm = (*TWO_BY_TWO, f"--output={self.output}", *slurm, "--parsable")
        command = ["sbatch", *slurm, "scripts/train.sbatch", *MODEL, *flags]
        self.id = int(cluster.run(*command, cwd=ROOT, env=environment))

    def log(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else "no output yet"

    def iteration(self) -> int:
        """The last iteration in metrics.jsonl; 0 before the first."""
        try:
            lines = (self.save / "metrics.jsonl").read_text().rsplit("\n", 2)
            return json.loads(lines[-2])["iteration"]
        except (FileNotFoundError, IndexError):
            return 0

    def leave(self, minutes: int) -> None:
        """Set the time limit so that more than `minutes` - 1 and at most `minutes` are left."""
        hours, gone, _seconds = self.cluster.job(self.id)["RunTime"].split(":")
        limit = 60 * int(hours) + int(gone) + minutes
        self.cluster.run("scontrol", "update", f"jobid={self.id}", f"TimeLimit={limit}")

    def reaches(self, iteration: int, seconds: float = 240) -> None:
        self._wait(lambda: self.iteration() >= iteration, seconds, f"iteration {iteration}")

    def logs(self, text: str, seconds: float = 240) -> None:
        self._wait(lambda: text in self.log(), seconds, f"{text!r} in its output")

    def requeued(self, times: int, *changes: str, seconds: float = 240) -> None:
        """Wait for the requeue number `times`, and start soon, with `changes` to the job, what
        Slurm would hold back for two minutes.
        """

        def back() -> str | None:
            now = self.cluster.job(self.id)
            if int(now.get("Restarts", 0)) >= times and now["JobState"] != "COMPLETING":
                return now["JobState"]
            assert now.get("JobState") not in ENDED, (
                f"job {self.id} ended as {now['JobState']} instead of being requeued\n"
                f"{self.log()[-6000:]}"
            )
            return None

        # slurmd refuses a start in the second of the end before it
        if self._wait(back, seconds, f"requeue {times}") == "PENDING":
            self.cluster.run(
                "scontrol", "update", f"jobid={self.id}", "StartTime=now+3seconds", *changes
            )

    def ends(self, state: str, seconds: float = 240) -> None:
        """Wait for the end of the job, which must be `state`."""
        found = self._wait(
            lambda: {self.cluster.job(self.id).get("JobState")} & ENDED,
            seconds,
            f"its end as {state}",
        )
        assert found == {state}, f"job {self.id} is {found}, not {state}\n{self.log()[-6000:]}"

    def ranks(self) -> dict[int, int]:
        """Process id of each rank that runs now."""
        found = {}
        job = str(self.cluster.configuration).encode(), b"%d" % self.id
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                entries = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended
            variables = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
            ours = (variables.get(b"SLURM_CONF"), variables.get(b"SLURM_JOB_ID")) == job
            if ours and any(word.endswith(b"pretrain_gpt.py") for word in words[1:3]):
                found[int(variables.get(b"RANK") or variables[b"SLURM_PROCID"])] = int(folder.name)
        return found

    def kill_rank(self, rank: int) -> None:
        """kill -9."""
        os.kill(self.ranks()[rank], signal.SIGKILL)

    @contextmanager
    def frozen(self, *ranks: int) -> Iterator[None]:
        """These ranks are stopped in the block."""
        processes = [process for rank, process in self.ranks().items() if rank in ranks]
        assert len(processes) == len(ranks)
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGCONT)

    def _wait(self, condition: Callable[[], object], seconds: float, what: str) -> object:
        def state() -> str:
            return (
                f"job {self.id}: {what}; now {self.cluster.job(self.id)}\n"
                f"{self.log()[-6000:]}\n{self.cluster.logs()}"
            )

        return wait_for(condition, seconds, state)
