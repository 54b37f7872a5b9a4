"""A study whose runs are jobs of a real Slurm, continued by another runner."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cluster import Cluster, wait_for

from megatron.study import raw
from megatron.study.description import read_study
from megatron.study.runner import run_of

ROOT = Path(__file__).resolve().parents[2]
STUDY = """
name: jobs
launcher: sbatch
sbatch: [--gpus-per-node=0, --mem=0, --cpus-per-task=1]
ranks-per-node: 1
at-once: 2
repeats: 1
iterations: 3
warmup: 1
environment: {OMP_NUM_THREADS: 1}
base: {num-layers: 2, hidden-size: 32, num-attention-heads: 4, seq-length: 16, vocab-size: 63,
  micro-batch-size: 1, global-batch-size: 4, mock-data: true, lr: 1e-3}
rows:
  - {world-size: 2}
  - {name: wild, lr: 1e30, clip-grad: 0}
"""


def test_jobs_go_on_without_their_runner_and_are_submitted_once(cluster: Cluster, tmp_path):
    file, folder = tmp_path / "study.yaml", tmp_path / "study"
    file.write_text(STUDY)
    plan = read_study(file)
    command = [sys.executable, str(ROOT / "tools/study.py"), str(file), "--folder", str(folder)]
    jobs = [run_of(folder, row, 0).folder / "job" for row in plan.rows]
    runner = subprocess.Popen(command, env=cluster.environment, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: all(job.exists() and job.read_text() for job in jobs), 240, "two jobs")
    finally:
        runner.kill()
        runner.wait()
    assert not raw.read(folder).runs
    numbers = [job.read_text() for job in jobs]
    done = subprocess.run(
        command, env=cluster.environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [job.read_text() for job in jobs] == numbers
    good, wild = (raw.read(folder).runs[row.key, 0] for row in plan.rows)
    told = (folder / "runs").glob("*/log.txt")
    assert good["status"] == "ok" and len(good["losses"]) == 3, [path.read_text() for path in told]
    assert good["host"].startswith("n[") and good["world_size"] == 2, "a rank on each of two nodes"
    assert wild["status"] == "crashed" and wild["exit_code"] == 1
    assert wild["reason"].startswith("iteration 2: NaN or Inf")
    assert not (
        run_of(folder, plan.rows[0], 0).folder / "latest_checkpointed_iteration.txt"
    ).exists()
