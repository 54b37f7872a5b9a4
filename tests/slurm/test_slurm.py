"""scripts/train.sbatch on a real Slurm, 2 nodes x 2 ranks: whatever ends a job, the run ends with
the bits of an undisturbed one.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cluster import Cluster, wait_for
from jobs import ITERATIONS, MODEL, ROOT, SAVE_INTERVAL, Job, launch_environment, program

from megatron.checkpoint.reader import open_checkpoint
from tools import compare_runs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hung(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Job, Future]]:
    """A job on one node whose only rank stops moving, and its requeue: its time runs out while
    another test runs.
    """
    one_node = "--nodes=1 --ntasks-per-node=1 --nodelist=n3 --time=10 --signal=B:USR1@60"
    folder, flags = tmp_path_factory.mktemp("hung"), ("--train-iters", "400")
    slurm = tuple(one_node.split())
    job = Job(cluster, folder, "srun", flags, slurm, LAYOUT="--micro-batch-size 2")
    job.reaches(SAVE_INTERVAL + 1)
    os.kill(job.ranks()[0], signal.SIGSTOP)
    job.leave(1)
    with ThreadPoolExecutor(1) as executor:
        yield job, executor.submit(job.requeued, 1, "TimeLimit=10")


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a job that nothing happened to."""
    job = Job(cluster, tmp_path_factory.mktemp("undisturbed"), "srun")
    job.ends("COMPLETED")
    assert job.iteration() == ITERATIONS
    assert "2 x 2 ranks by srun" in job.log() and "tp1 cp1 pp2 dp2" in job.log()
    return job.save


def check_same_run(found: Path, expected: Path, capsys: pytest.CaptureFixture) -> None:
    """Every logged value of every iteration, and the last checkpoint, bit for bit."""
    assert compare_runs.main([str(found), str(expected)]) == 0, capsys.readouterr().out
    with open_checkpoint(found) as a, open_checkpoint(expected) as b:
        assert a.state["iteration"] == ITERATIONS
        assert {**a.state, "config": None} == {**b.state, "config": None}, (
            "folders and tracker differ, nothing else"
        )
        assert set(a.names) == set(b.names) and all(
            torch.equal(a.read_tensor(name), b.read_tensor(name)) for name in a.names
        )


@pytest.mark.full
def test_time_limit_and_killed_rank_under_torchrun(cluster, hung, undisturbed, tmp_path, capsys):
    """Left to itself torchrun would die of SIGUSR1, and end with 1 whatever the ranks ended
    with.
    """
    flags, slurm = ("--wandb-project", "slurm"), ("--time=10", "--signal=B:USR1@119")
    job = Job(cluster, tmp_path, "torchrun", flags, slurm, WANDB_MODE="offline")
    job.reaches(30)
    with job.frozen(1):  # else the run might be over first
        job.leave(2)
        job.logs("time is nearly over: saving")
    job.requeued(1, "TimeLimit=10")
    assert "2 x 2 ranks by torchrun" in job.log()
    assert "the ranks ended with exit code 85" in job.log()
    saved = open_checkpoint(job.save).path
    identity = (job.save / "wandb_run_id.txt").read_text().strip()
    assert int(saved.name.removeprefix("iter_")) == job.iteration(), "no step is lost"
    job.reaches(60)
    assert f"loaded checkpoint {saved}" in job.log()

    job.kill_rank(3)
    job.requeued(2)
    job.ends("COMPLETED")
    assert len(list((job.save / "wandb").glob(f"offline-run-*-{identity}"))) == 3, (
        "all starts write the same wandb run"
    )
    check_same_run(job.save, undisturbed, capsys)


@pytest.mark.full
def test_time_limit_without_a_save_before_it(hung):
    job, requeued = hung
    requeued.result()
    assert "time is over" in job.log()
    job.ends("COMPLETED")
    started = r"start 2, attempt 1 of 3 from iteration [1-9]\d+: 1 x 1 ranks by srun"
    assert re.search(started, job.log())


@pytest.mark.campaign
def test_killed_rank_controller_and_node_under_srun(cluster, undisturbed, tmp_path, capsys):
    job = Job(cluster, tmp_path, "srun")
    job.reaches(30)
    job.kill_rank(2)
    job.requeued(1)
    assert "the ranks ended with exit code 137" in job.log()

    job.reaches(50)
    lost = cluster.nodes_of(job.id)[1]
    cluster.kill("slurmctld")
    job.reaches(55)
    with job.frozen(2, 3):  # what the peers of a dead machine see: nothing
        cluster.start_controller()
        what = "the new controller to know the job"
        wait_for(lambda: cluster.job(job.id).get("JobState") == "RUNNING", 30, what)
        cluster.kill(lost)
        job.requeued(2)
    assert "attempt 1 of 3 from iteration" in job.log().rsplit("start 2", 1)[1]
    job.ends("COMPLETED")
    assert lost not in cluster.nodes_of(job.id)
    cluster.start_node(lost)
    check_same_run(job.save, undisturbed, capsys)


@pytest.mark.full
def test_scancel_saves_and_is_final(cluster, tmp_path):
    job = Job(cluster, tmp_path, "srun", ("--train-iters", "100000", "--save-interval", "100000"))
    job.reaches(5)
    cluster.run("scancel", str(job.id))
    job.ends("CANCELLED")
    wait_for(lambda: not job.ranks(), 20, "the ranks to end")
    assert int(open_checkpoint(job.save).path.name.removeprefix("iter_")) == job.iteration()
    assert "] requeued" not in job.log() and cluster.job(job.id)["Restarts"] == "0"


@pytest.mark.campaign
def test_a_run_that_fails_at_once_is_given_up(cluster, tmp_path):
    job = Job(cluster, tmp_path, "srun", ("--lr", "1e30", "--clip-grad", "0"), MAX_ATTEMPTS="2")
    job.requeued(1)
    job.ends("FAILED")
    assert "attempt 1 of 2 from iteration 0" in job.log()
    assert "attempt 2 of 2 from iteration 0" in job.log()
    assert job.log().count("NaN or Inf") == 2
    assert "no checkpoint after iteration 0 in 2 attempts: not requeued" in job.log()
    assert cluster.job(job.id)["Restarts"] == "1"


def test_a_mistake_in_the_settings_is_not_tried_again(cluster, tmp_path):
    wrong = Job(cluster, tmp_path / "flags", "srun", ("--num-attention-heads", "5"))
    unknown = Job(cluster, tmp_path / "preset", "srun", PRESET="gpt4")
    bare = program(tmp_path / "bare python", f'exec {sys.executable} -S "$@"')
    without = Job(cluster, tmp_path / "torch", "srun", PYTHON=str(bare))
    for job, message in (
        (wrong, "--num-attention-heads 5"),
        (unknown, "no preset gpt4: choose"),
        (without, f"PYTHON={bare} cannot be used on"),
    ):
        job.ends("FAILED")
        assert message in job.log() and "] requeued" not in job.log()
        assert cluster.job(job.id)["ExitCode"] == "2:0"


@pytest.mark.full
def test_sigusr1_to_the_launcher_alone_reaches_every_rank(tmp_path):
    """Slurm's cgroup plugin signals only the process that srun started; here the plugin signals all
    its children too.
    """
    flags = "--micro-batch-size 2 --mock-data --lr 1e-3 --train-iters 100000 --save".split()
    command = ["bash", "scripts/launch.sh", "torchrun", *MODEL, *flags, str(tmp_path / "run")]
    environment = launch_environment(tmp_path, 2) | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, text=True) as launcher:
        next(line for line in launcher.stdout if "] iteration " in line)
        launcher.send_signal(signal.SIGUSR1)
        launcher.send_signal(signal.SIGUSR1)
        rest = launcher.stdout.read()
        assert launcher.wait(60) == 85, rest
    assert (tmp_path / "failures").read_text() == "85 task 0 on n0\n"
    assert "received SIGUSR1" in rest and rest.count(" saved checkpoint ") == 1
