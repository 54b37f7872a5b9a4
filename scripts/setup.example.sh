# A file for SETUP of scripts/train.sbatch: what is particular to your cluster. Copy it, keep what you need, and start with
#   SETUP=setup.sh sbatch scripts/train.sbatch
# train.sbatch reads it with bash on the first node, before everything else; what is exported reaches every rank.

# Modules and environments.
#   module purge
#   module load cuda/13.0 nccl
#   source /path/to/venv/bin/activate         # or: eval "$(conda shell.bash hook)" && conda activate train
#   PYTHON=/path/to/venv/bin/python           # without it: .venv of the checkout, else `python` of the PATH

# A container: words in front of `bash scripts/launch.sh` on every node. The image needs bash, coreutils and torch, and must see checkout, data and SAVE.
#   CONTAINER="apptainer exec --nv --bind '$PWD' '/images/pytorch 2.13.sif'"
# or, with the pyxis plugin, flags for srun:
#   SRUN_FLAGS="--container-image=/images/pytorch.sqsh --container-mounts=$PWD:$PWD --container-workdir=$PWD"
#   PYTHON=python                             # of the image

# Network. The interfaces that join the nodes, by `ip -br address` on a compute node.
#   export NCCL_SOCKET_IFNAME=ib0             # of the first messages of NCCL
#   export GLOO_SOCKET_IFNAME=ib0             # of Gloo, on CPUs and around checkpoints
#   export NCCL_IB_HCA=mlx5                   # InfiniBand adapters that NCCL takes
#   export NCCL_DEBUG=WARN                    # INFO: what NCCL found, in the log of each rank
#   SRUN_FLAGS="--mpi=none --network=..."     # more flags for srun, if your site wants some

# What launch.sh sets, unless it is set here (docs/howto/network.md).
#   export NCCL_LAUNCH_ORDER_IMPLICIT=0
#   export PYTORCH_ALLOC_CONF=expandable_segments:False

# Caches on the node's own disk.
#   export TMPDIR=/local/$SLURM_JOB_ID
