"""scripts/train.sbatch with PREFLIGHT=1 on a real Slurm: a node that is named is left out."""

from __future__ import annotations

import pytest
from cluster import wait_for
from jobs import Job, program

pytestmark = [pytest.mark.slow, pytest.mark.full]
BAD, GOOD, OTHER = "n0", "n1", "n3"  # n2 is excluded by the job itself


def test_a_node_whose_disk_is_full_is_left_out(cluster, tmp_path):
    """The disk is a small tmpfs over the folder for compiled kernels, which one node alone sees.
    The run is done by the other nodes, after one requeue.
    """
    cache = tmp_path / "cache"
    cache.mkdir()
    node = program(
        tmp_path / "node",
        f'if [ "$SLURMD_NODENAME" = {BAD} ]; then\n'
        "    exec unshare --mount --propagation private bash -ec "
        f"""'mount -t tmpfs -o size=64k tmpfs "{cache}"; exec "$@"' - "$@"\n"""
        'fi\nexec "$@"',
    )
    wait_for(lambda: cluster.idle_nodes() >= {BAD, GOOD, OTHER}, 60, "idle nodes")
    job = Job(
        cluster,
        tmp_path,
        "srun",
        ("--train-iters", "2"),
        ("--ntasks-per-node=1", "--exclude=n2"),
        CONTAINER=str(node),
        TRITON_CACHE_DIR=str(cache),
        PREFLIGHT="1",
        PREFLIGHT_EXCLUDE="1",
        PREFLIGHT_FLAGS="--tolerance 0.9",
    )
    job.requeued(1)
    first = job.log()
    assert f"fault: {BAD}: {cache}: 1 MiB cannot be written into it (No space left" in first
    assert f"preflight: leave out {BAD}\n" in first and f"] requeued without {BAD}" in first
    assert not (job.save / "metrics.jsonl").exists(), "trained on a node that was named"
    job.ends("COMPLETED")
    assert cluster.nodes_of(job.id) == [GOOD, OTHER]
    assert set(cluster.job(job.id)["ExcNodeList"].split(",")) == {BAD, "n2"}
    assert job.log().count("preflight: in order\n") == 1 and job.iteration() == 2
