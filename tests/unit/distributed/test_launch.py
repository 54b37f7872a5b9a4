"""What the launchers' variables mean, and which device and threads follow from them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

from megatron.config.groups import DistributedConfig
from megatron.distributed import setup
from megatron.distributed.launchers import (
    Launch,
    LaunchError,
    expand_hosts,
    rough_launch,
)
from megatron.distributed.setup import (
    choose_device,
    connect,
    read_launch,
    set_determinism,
    share_cores,
    warn_of_idle_gpus,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "29400",
}
PARTS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "99",
}


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


def test_one_process():
    batch = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "MASTER_ADDR": "x"}
    assert read_launch({}) == read_launch(batch) == Launch()
    assert read_launch({"RANK": "0", "WORLD_SIZE": "1"}) == Launch(launcher="environment")


def test_torchrun():
    launch = Launch(5, 8, 1, 4, "environment", "n0", 29400, "environment")
    assert read_launch({**TORCHRUN, **SRUN}) == launch
    launch = Launch(5, 8, 1, 4, "torchrun", "n0", 29400, "7", agent_store=True)
    elastic = {"TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert read_launch({**TORCHRUN, **elastic}) == launch


def test_srun():
    assert read_launch(SRUN) == Launch(5, 7, 1, 3, "srun", "gpu07", 23456, "srun/123456.0.0", False)
    given = read_launch({**SRUN, **MEET, "SLURM_STEP_NODELIST": "gpu[x]"})
    assert (given.address, given.port) == ("n0", 4000)


# rank 5 of 8, second of the 4 of its host, as each launcher numbers it; the last: no local size
MPI = {
    "mpirun (Open MPI)": ["OMPI_COMM_WORLD_" + part for part in PARTS],
    "mpirun (MVAPICH)": ["MV2_COMM_WORLD_" + part for part in PARTS],
    "jsrun": ["JSM_NAMESPACE_" + part for part in PARTS],
    "mpiexec (PALS)": ["PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"],
    "mpiexec (Hydra)": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    "a PMI launcher": ["PMI_" + part for part in PARTS],
    "a PMIx launcher": ["PMIX_" + part for part in PARTS],
    "flux run": ["FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"],
}
MEET = {"MASTER_ADDR": "n0", "MASTER_PORT": "4000"}


def of_mpi(launcher: str, *values: int) -> dict[str, str]:
    return dict(zip(MPI[launcher], map(str, values or (5, 8, 1, 4))))


@pytest.mark.parametrize("launcher", MPI)
class TestMPI:
    """mpirun and its relatives: a process that sees a size above 1 joins or refuses."""

    def test_it_joins(self, launcher):
        found = read_launch({**of_mpi(launcher), **MEET})
        # without a count of its host's ranks, and without a GPU: all ranks are taken to be here
        local_size = 8 if launcher == "flux run" else 4
        assert found == Launch(5, 8, 1, local_size, launcher, "n0", 4000, f"{launcher}/")
        assert rough_launch(of_mpi(launcher)).rank == 5

    def test_without_an_address_it_joins_on_one_host_and_is_refused_on_several(self, launcher):
        with pytest.raises(LaunchError, match=r"WORLD_SIZE=8, .*but MASTER_ADDR not set"):
            read_launch(of_mpi(launcher))
        if launcher != "flux run":
            found = read_launch(of_mpi(launcher, 1, 2, 1, 2))
            assert (found.rank, found.address, found.port) == (1, "localhost", 29500)

    def test_one_process_is_alone(self, launcher):
        assert read_launch(of_mpi(launcher, 0, 1, 0, 1)).world_size == 1

    def test_a_rank_without_a_size_is_refused(self, launcher):
        environment = without(of_mpi(launcher), MPI[launcher][1])
        with pytest.raises(LaunchError, match="but WORLD_SIZE not set"):
            read_launch({**environment, **MEET})

    def test_a_rank_without_its_number_on_the_host_is_refused(self, launcher):
        environment = without(of_mpi(launcher), "PMI_LOCAL_RANK", *MPI[launcher][2:])
        with pytest.raises(LaunchError, match="but LOCAL_RANK not set"):
            read_launch({**environment, **MEET})
        found = read_launch({**environment, **MEET, "LOCAL_RANK": "1"})
        assert (found.rank, found.world_size, found.local_rank) == (5, 8, 1)

    def test_its_daemon_was_started_by_srun(self, launcher):
        """What srun sets for the daemon is not of the ranks; bare PMI variables are srun's own."""
        environment = {**SRUN, **of_mpi(launcher), **MEET}
        by_srun = launcher.startswith("a PMI")
        assert read_launch(environment).launcher == ("srun" if by_srun else launcher)

    def test_a_wrapper_that_sets_rank_and_local_rank(self, launcher):
        named = {"RANK": "5", "LOCAL_RANK": "1", "MASTER_ADDR": "n7", "MASTER_PORT": "4001"}
        found = read_launch({**of_mpi(launcher), **MEET, **named})
        assert (found.rank, found.world_size, found.local_rank) == (5, 8, 1)
        assert (found.launcher, found.address, found.port) == ("environment", "n7", 4001)


@pytest.mark.parametrize(
    "environment",
    [
        of_mpi("mpirun (Open MPI)", 0, 1, 0, 1),
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_pmix_variables_of_a_launcher_of_one_process(environment):
    assert read_launch({**environment, "PMIX_RANK": "0"}).world_size == 1


WRAPPED = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "7", **MEET}


@pytest.mark.parametrize(
    "environment, local_size",
    [
        (WRAPPED, 7),  # deepspeed's launcher: nothing gives the number here
        ({**SRUN, **WRAPPED}, 3),
        ({**SRUN, **without(WRAPPED, "WORLD_SIZE")}, 3),
        ({**SRUN, **WRAPPED, "SLURM_STEP_TASKS_PER_NODE": "2x3"}, 7),
        ({**without(SRUN, "SLURM_STEP_ID", "SLURM_NODEID"), **WRAPPED}, 7),
        ({**SRUN, **WRAPPED, "SLURM_PROCID": "0"}, 7),  # one task a node starts many processes
    ],
)
def test_rank_without_local_world_size(environment, local_size):
    found = read_launch(environment)
    assert found == Launch(5, 7, 1, local_size, "environment", "n0", 4000, "environment")


def test_a_world_size_that_the_batch_script_exports():
    """srun's ranks with it; another number of tasks is a mistake that would train alone."""
    assert read_launch({**SRUN, "WORLD_SIZE": "7"}) == read_launch(SRUN)
    with pytest.raises(LaunchError, match="WORLD_SIZE=8, but srun gives a world size of 7"):
        read_launch({**SRUN, "WORLD_SIZE": "8"})


def test_slurms_number_of_ranks_on_a_node_wins():
    assert read_launch({**SRUN, "LOCAL_WORLD_SIZE": "2"}) == read_launch(SRUN)


def test_a_task_of_srun_whose_variables_were_dropped_does_not_train_alone():
    dropped = {"SLURM_PROCID": "3"}, {"SLURM_STEP_NUM_TASKS": "2"}, without(SRUN, "SLURM_NODEID")
    pmi = {"SLURM_PROCID": "3", "PMI_RANK": "3", "PMI_SIZE": "8", "LOCAL_RANK": "1", **MEET}
    for environment in (*dropped, {"SLURM_PROCID": "3", "WORLD_SIZE": "8"}, pmi):
        with pytest.raises(LaunchError, match=r"\(launcher: srun\), but .* not set"):
            read_launch(environment)


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"RANK": "1"}, "RANK=1 (launcher: environment), but WORLD_SIZE, LOCAL_RANK"),
        ({"WORLD_SIZE": "1"}, "WORLD_SIZE=1 (launcher: environment), but RANK, LOCAL_RANK"),
        ({"RANK": "3", "WORLD_SIZE": "1"}, "number of ranks; set WORLD_SIZE to the number of"),
        (without(TORCHRUN, "MASTER_PORT"), "but MASTER_PORT not set: set them"),
        ({**TORCHRUN, "RANK": "8"}, "RANK=8, WORLD_SIZE=8, LOCAL_RANK=1"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "a host cannot have more ranks than the job"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE=two: must be a non-negative integer"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "a port is a number from 1 to 65535"),
        (without(SRUN, "SLURM_LOCALID", "SLURM_STEP_NODELIST"), "but LOCAL_RANK, MASTER_ADDR not"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2x3"}, "=2x3: expected counts such as 2(x3),1"),
        ({**SRUN, "SLURM_NODEID": "3"}, "PER_NODE=2(x2),3 is of 3 nodes; start with srun"),
        ({**SRUN, "SLURM_PROCID": "x"}, "SLURM_PROCID=x: must be a non-negative integer"),
    ],
)
def test_wrong_variables_are_named(environment, message):
    with pytest.raises(LaunchError, match=re.escape(message)):
        read_launch(environment)


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("localhost", "localhost"),
        ("gpu-a.cluster.org,gpu-b", "gpu-a.cluster.org gpu-b"),
        ("gpu[008-010,17]", "gpu008 gpu009 gpu010 gpu17"),
        ("gpu[08,10-11],login1,n[1-2]", "gpu08 gpu10 gpu11 login1 n1 n2"),
        ("rack[1-2]-n[01-02]x", "rack1-n01x rack1-n02x rack2-n01x rack2-n02x"),
    ],
)
def test_host_lists(text, hosts):
    assert expand_hosts(text) == hosts.split()


@pytest.mark.parametrize("text", ["gpu[1-", "gpu1-2]", "gpu[a-b]", "gpu[]", "[[1]]", "a,,b", "a b"])
def test_wrong_host_lists(text):
    with pytest.raises(LaunchError, match="set MASTER_ADDR to rank 0's host"):
        expand_hosts(text)


class TestDevice:
    """With as many pretended GPUs as a case needs."""

    @pytest.fixture
    def gpus(self, monkeypatch):
        def pretend(count: int) -> list[torch.device]:
            current: list[torch.device] = []
            monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
            monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
            monkeypatch.setattr(torch.cuda, "set_device", current.append)
            return current

        return pretend

    @pytest.mark.parametrize(
        "count, launcher, backend, chosen",
        [
            (4, "torchrun", "auto", ("cuda:3", "nccl")),
            (4, "torchrun", "nccl", ("cuda:3", "nccl")),
            (2, "torchrun", "gloo", ("cuda:1", "gloo")),  # which shares GPUs
            (1, "srun", "auto", ("cuda:0", "nccl")),  # each process sees a different one
            (1, "environment", "auto", ("cuda:0", "nccl")),
        ],
    )
    def test_the_device_of_a_rank(self, gpus, count, launcher, backend, chosen):
        current = gpus(count)
        config = DistributedConfig(distributed_backend=backend)
        device, library = choose_device(Launch(3, 4, 3, 4, launcher), config)
        assert (str(device), library) == chosen and current == [device]

    @pytest.mark.parametrize("launcher, count", [("torchrun", 1), ("srun", 3), ("srun", 0)])
    def test_more_ranks_than_gpus(self, gpus, launcher, count):
        gpus(count)
        config = DistributedConfig(distributed_backend="nccl")
        fault = f"rank 7: .* each of the 4 ranks of this host, and torch finds {count}; .*gloo"
        with pytest.raises(LaunchError, match=fault):
            choose_device(Launch(7, 8, 3, 4, launcher), config)

    def test_idle_gpus_are_named(self, gpus, caplog):
        gpus(8)
        for local_size in (1, 8):
            launch = Launch(1, 8, 0, local_size, "srun")
            warn_of_idle_gpus(launch, torch.device("cuda:0"))
        warn_of_idle_gpus(Launch(), torch.device("cpu"))
        (record,) = caplog.records
        assert "uses 1 of the 8 GPUs" in record.message and "--ntasks-per-node=8" in record.message


class TestDeterminism:
    """torch's CUDA kernels repeat their bits unless asked not to; a CPU's are left alone."""

    GPU = torch.device("cuda")

    @pytest.fixture(autouse=True)
    def restored(self):
        fills = torch.utils.deterministic.fill_uninitialized_memory
        order = torch._C._get_sdp_priority_order()
        yield
        torch._C._set_sdp_priority_order(order)
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills

    def test_on_and_off(self):
        environment: dict[str, str] = {}
        set_determinism(self.GPU, True, environment)
        assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        order = torch._C._get_sdp_priority_order()
        set_determinism(self.GPU, False, environment)
        assert not torch.are_deterministic_algorithms_enabled()
        # attention: cuDNN's first, and the others as they were
        first, *others = torch._C._get_sdp_priority_order()
        assert first == int(SDPBackend.CUDNN_ATTENTION) != order[0]
        assert others == [each for each in order if each != first]

    def test_what_the_user_set(self):
        set_determinism(self.GPU, True, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
        set_determinism(self.GPU, False, {"CUBLAS_WORKSPACE_CONFIG": ":0:0"})
        message = "CUBLAS_WORKSPACE_CONFIG=:0:0: .* unset it, or give --no-deterministic-mode"
        with pytest.raises(LaunchError, match=message):
            set_determinism(self.GPU, True, {"CUBLAS_WORKSPACE_CONFIG": ":0:0"})


class TestThreads:
    """The ranks of a host share its cores."""

    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch):
        self.chosen: list[int] = []
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
        monkeypatch.setattr(torch, "set_num_threads", self.chosen.append)

    @pytest.mark.parametrize(
        "launch, environment, threads",
        [
            (Launch(1, 4, 1, 4, "environment"), {}, [3]),
            (Launch(1, 4, 0, 1, "environment"), {}, []),
            (Launch(1, 4, 1, 4, "environment"), {"OMP_NUM_THREADS": "1"}, []),
            (Launch(1, 4, 1, 4, "srun"), {"SLURM_CPUS_PER_TASK": "5"}, [5]),
            (Launch(1, 4, 1, 4, "srun"), {"SLURM_CPUS_PER_TASK": "5", "OMP_NUM_THREADS": "2"}, []),
            (Launch(1, 4, 1, 4, "torchrun"), {"OMP_NUM_THREADS": "2"}, []),
        ],
    )
    def test_a_part_of_the_cores(self, launch, environment, threads):
        share_cores(launch, environment)
        assert self.chosen == threads

    @pytest.mark.parametrize(
        "parent, threads", [(b"PATH=/bin\0LANG=C\0", [3]), (b"PATH=/bin\0OMP_NUM_THREADS=1\0", [])]
    )
    def test_torchruns_one_thread_is_not_the_users(self, monkeypatch, parent, threads):
        monkeypatch.setattr(
            Path,
            "read_bytes",
            lambda path: parent if str(path) == f"/proc/{os.getppid()}/environ" else b"",
        )
        share_cores(Launch(1, 4, 1, 4, "torchrun"), {"OMP_NUM_THREADS": "1"})
        assert self.chosen == threads


@pytest.mark.parametrize("before", ["", "NCCL error\nLast error:\n"])
def test_a_backend_that_cannot_connect_is_one_message(monkeypatch, before):
    def broken(*_args, **_keywords):
        raise RuntimeError(f"{before}Connection refused\nstack\nof torch")

    monkeypatch.setattr(setup, "meet", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", broken)
    with pytest.raises(LaunchError) as raised:
        connect(Launch(1, 2, 1, 2), "gloo", 0.01, {})
    message = str(raised.value)
    assert message.startswith("rank 1: all 2 ranks arrived, but gloo could not connect them")
    assert "GLOO_SOCKET_IFNAME" in message and message.endswith("(Connection refused)")
