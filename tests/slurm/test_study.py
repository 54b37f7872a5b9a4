"""A study whose runs are jobs of a real Slurm, continued by another runner."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster, wait_for
from megatron.tools._study import raw
from megatron.tools._study.description import read_study
from megatron.tools._study.runner import run_of

ROOT = Path(__file__).resolve().parents[2]
STUDY = """
name: jobs
launcher: sbatch
sbatch: [--gpus-per-node=0, --mem=0, --cpus-per-task=1]
ranks-per-node: 1
repeats: 1
iterations: 3
warmup: 1
environment: {OMP_NUM_THREADS: 1}
base: {num-layers: 2, hidden-size: 32, num-attention-heads: 4, seq-length: 16, vocab-size: 63,
  micro-batch-size: 1, global-batch-size: 4, mock-data: true, lr: 1e-3}
rows: [{world-size: 2}]
"""


@pytest.mark.full
def test_a_job_goes_on_without_its_runner_and_is_submitted_once(cluster: Cluster, tmp_path):
    file, folder = tmp_path / "study.yaml", tmp_path / "study"
    file.write_text(STUDY)
    plan = read_study(file)
    command = [sys.executable, str(ROOT / "tools/study.py"), str(file), "--folder", str(folder)]
    job = run_of(folder, plan.rows[0], 0).folder / "job"
    runner = subprocess.Popen(command, env=cluster.environment, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: job.exists() and job.read_text(), 240, "the job")
    finally:
        runner.kill()
        runner.wait()
    assert not raw.read(folder).runs
    number = job.read_text()
    done = subprocess.run(
        command, env=cluster.environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert job.read_text() == number
    good = raw.read(folder).runs[plan.rows[0].key, 0]
    logs = (folder / "runs").glob("*/log.txt")
    assert good["status"] == "ok" and len(good["losses"]) == 3, [path.read_text() for path in logs]
    assert good["host"].startswith("n[") and good["world_size"] == 2, "a rank on each of two nodes"
    assert not job.with_name("latest_checkpointed_iteration.txt").exists()
