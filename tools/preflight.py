"""Check the nodes of a job before it trains. Started as the run itself would be, on all ranks:

    srun --nodes=16 --ntasks-per-node=8 python tools/preflight.py <flags of pretrain_gpt.py>
    torchrun --nproc-per-node 8 tools/preflight.py <flags of pretrain_gpt.py>

On every node: are data, tokenizer and --save there and alike, do the folders for caches take a
file, is there room for a checkpoint; are versions, flags and devices equal, do the clocks agree;
speed of matrix products, of copies, of the disk, between pairs of nodes and within every axis of
the layout. A table, a line for each fault, and a last line: `preflight: in order`, `preflight:
leave out NODE,NODE` or `preflight: not in order` (no node is to blame, or it cannot be said which).

    --start-timeout SECONDS   in which every rank must arrive (120)
    --timeout SECONDS         in which every rank must answer in each stage (60)
    --tolerance SHARE         by which a node may be slower than the median or than expected (0.1)
    --clock-tolerance SECONDS by which a clock may be off (2)
    --expect-gemm TFLOP/s     of each device, in bf16 on a GPU and fp32 on a CPU
    --expect-copy GB/s        read and written in each device's memory
    --expect-disk GB/s        that each node writes to --save, all at once
    --expect-network GB/s     between two nodes, for each rank
    --node NAME               of this node, as --exclude of Slurm takes it (its host name)
    --folders PATH,PATH       further ones that each node must be able to write to
    --report FILE             also write what was found there, as JSON

Exit code: 0 in order, 3 nodes are named, 2 not in order or wrong flags.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if not __package__:  # run as a file of a checkout
    import _checkout  # noqa: F401

import megatron.kernels
from megatron.tools._plan.checkpoint import shard_bytes
from megatron.tools._preflight.judge import (
    CLOCK,
    TOLERANCE,
    Fault,
    Limits,
    judge,
    leave_out,
    node_speeds,
    report,
    verdict,
)
from megatron.tools._preflight.meeting import Findings, Leader, Meeting, Member, Patience
from megatron.tools._preflight.probes import Needs, Probe

import megatron
from megatron.checkpoint.manifest import TRACKER
from megatron.config.arguments import dump_config, parse_arguments
from megatron.config.data_paths import parse_blend
from megatron.config.errors import ArgumentErrors, UserError
from megatron.config.groups import Config
from megatron.config.streams import escape_unencodable  # noqa: E402
from megatron.config.validate import resolve
from megatron.data.tokenizer import build_tokenizer
from megatron.distributed.groups import describe_layout, group_options, layout_of
from megatron.distributed.launchers import (
    Launch,
    expand_counts,
    expand_hosts,
    rough_launch,
)
from megatron.distributed.peers import run_for
from megatron.distributed.setup import choose_device, make_groups, read_launch

NAMED, NOT_IN_ORDER = 3, 2  # exit codes
STAGGER = 0.5  # seconds by which the nodes follow each other where rank 0 is silent
PATIENCE = 8.0  # seconds in which rank 0 prints what is wrong, and its launcher ends the others
CACHES = "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"  # folders, where they are set


def above_zero(text: str) -> float:
    """A number of the command line. Raises ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        value = float(text)
        if 0 < value < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text} is no number above 0")


def read_own(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags that are this tool's, and the other words."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    number: dict[str, Any] = {"type": above_zero, "metavar": "NUMBER"}
    parser.add_argument("--start-timeout", default=120.0, **number)
    parser.add_argument("--timeout", default=60.0, **number)
    parser.add_argument("--tolerance", default=TOLERANCE, **number)
    parser.add_argument("--clock-tolerance", default=CLOCK, **number)
    for kind in ("gemm", "copy", "disk", "network"):
        parser.add_argument(f"--expect-{kind}", **number)
    parser.add_argument("--node", default=socket.gethostname())
    parser.add_argument("--folders", default="")
    parser.add_argument("--report", type=Path)
    try:
        return parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ArgumentErrors([f"{error.argument_name}: {error.message}"]) from None


def input_files(config: Config) -> list[str]:
    """Files that the run reads on every node."""
    data = config.data
    prefixes: list[str] = []
    for words in (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path):
        prefixes += [prefix for _, prefix in parse_blend(words or (), "--data-path")]
    found = [f"{prefix}{end}" for prefix in dict.fromkeys(prefixes) for end in (".bin", ".idx")]
    return found + [
        path for path in (data.tokenizer_model, data.vocab_file, data.merge_file) if path
    ]


def own_folders(config: Config, further: str) -> list[str]:
    """Folders that each node writes to for itself."""
    found = [tempfile.gettempdir(), *(os.environ[name] for name in CACHES if os.environ.get(name))]
    found += [
        path
        for path in (
            config.checkpoint.local_checkpoint_dir,
            config.optimizer.optimizer_nvme_offload,
        )
        if path
    ]
    return list(dict.fromkeys([*found, *filter(None, further.split(","))]))


def checkpoint_bytes(config: Config, world_size: int) -> float:
    """Of one checkpoint; 0 where the tokenizer cannot be read, which the files will show."""
    try:
        vocab_size = build_tokenizer(resolve(config, world_size, None).config.data).vocab_size
        config = resolve(config, world_size, vocab_size).config
    except UserError:
        return 0.0
    stages = shard_bytes(config, vocab_size, world_size)
    return sum(stages) * world_size / len(stages)


def without_files(config: Config) -> Config:
    """The same run on computed tokens, for its layout: that a file lacks on a node is not a fault
    of the flags here, and is found by the look at that node.
    """
    data = dataclasses.replace(
        config.data,
        mock_data=True,
        data_path=None,
        split=None,
        train_data_path=None,
        valid_data_path=None,
        test_data_path=None,
        check_data=False,
        tokenizer_type="NullTokenizer",
        tokenizer_model=None,
        vocab_file=None,
        merge_file=None,
        vocab_size=config.data.vocab_size or 1,
    )
    return dataclasses.replace(config, data=data)


def needs_of(config: Config, launch: Launch, further: str) -> Needs:
    """What the run reads and writes."""
    load = config.checkpoint.load
    return Needs(
        files=tuple(input_files(config)),
        fresh=(os.path.join(load, TRACKER),) if load else (),
        folders=tuple(own_folders(config, further)),
        save=config.checkpoint.save,
        save_bytes=checkpoint_bytes(config, launch.world_size) if launch.rank == 0 else 0.0,
        settings=dump_config(config),
        code=(str(Path(megatron.__file__).parent), *map(str, megatron.kernels.__path__)),
    )


def silent_leader(launch: Launch, hosts: list[str], why: str) -> tuple[list[str], int]:
    """What a rank prints when rank 0 cannot be reached: the first rank of a node after the other,
    so that one does, whose end ends the others.
    """
    host = hosts[0] if hosts else None
    text = (
        f"{host or launch.address}: rank 0, which the others report to, does not answer rank "
        f"{launch.rank} ({why}): look whether its process runs, and at the network between them"
    )
    time.sleep(
        STAGGER * (launch.rank // max(1, launch.local_size)) % 10 + STAGGER * launch.local_rank
    )
    faults = [Fault(text, host)]
    return [f"fault: {text}", verdict(faults)], NAMED if host else NOT_IN_ORDER


def write_report(path: Path, findings: Findings, faults: list[Fault]) -> None:
    """All that was found, as JSON."""
    found = {
        "verdict": verdict(faults),
        "leave_out": leave_out(faults),
        "faults": [dataclasses.asdict(fault) for fault in faults],
        "nodes": node_speeds(findings),
        "ranks": {rank: dataclasses.asdict(facts) for rank, facts in findings.facts.items()},
        "axes": [one._asdict() for one in findings.axes],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def rank_hosts(launch: Launch, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The host of each rank, in the blocks of srun; empty under other launchers. Raises
    LaunchError.
    """
    if launch.launcher != "srun":
        return []
    hosts = expand_hosts(environment["SLURM_STEP_NODELIST"])
    tasks = expand_counts(environment["SLURM_STEP_TASKS_PER_NODE"])
    return [host for host, count in zip(hosts, tasks) for _ in range(count)]


def check(argv: list[str]) -> tuple[list[str], int]:
    """The lines that this rank prints, and the exit code. Raises UserError."""
    begun = time.monotonic()
    own, rest = read_own(argv)
    config = parse_arguments(rest).config
    launch = read_launch()
    resolved = resolve(without_files(config), launch.world_size, None).config
    layout = layout_of(resolved, launch.world_size)
    needs = needs_of(config, launch, own.folders)
    hosts = rank_hosts(launch)
    probe = Probe(
        needs,
        lambda: choose_device(launch, config.distributed),
        launch.rank,
        first_of_node=launch.local_rank == 0,
    )
    try:
        meeting = Meeting.at(launch, Patience(own.start_timeout, own.timeout))
        member = Member(
            meeting, own.node, probe, lambda: make_groups(layout, **group_options(resolved))
        )
        if launch.rank > 0:
            return [], member.take_part()
    except (RuntimeError, UserError) as error:
        if launch.rank == 0:
            raise
        return silent_leader(launch, hosts, str(error).splitlines()[0])
    leader = Leader(meeting.clone())
    run_for(0.0, member.take_part)
    findings = leader.gather()
    expected = {
        kind: value
        for kind, value in (
            ("GEMM", own.expect_gemm),
            ("copy", own.expect_copy),
            ("disk", own.expect_disk),
            ("network", own.expect_network),
        )
        if value is not None
    }
    faults = judge(findings, needs, Limits(own.tolerance, own.clock_tolerance, expected), hosts)
    nodes = len(set(findings.nodes.values()))
    title = (
        f"preflight of {launch.world_size} ranks on {nodes} nodes ({describe_layout(layout)}), "
        f"{time.monotonic() - begun:.1f} s"
    )
    code = NAMED if leave_out(faults) else NOT_IN_ORDER if faults else 0
    lines = report(findings, faults, title)
    if own.report is not None:
        try:
            write_report(own.report, findings, faults)
        except OSError as error:
            lines.insert(1, f"--report {own.report} was not written: {error.strerror}")
    print("\n".join(lines), flush=True)  # before the others end
    leader.end(code, findings)
    return [], code


def print_error(error: UserError, rank: int) -> int:
    """Print an error by rank 0, and by another rank only if the launcher lets it live on, which
    means that rank 0 has not failed; the exit code.
    """
    if rank > 0:
        time.sleep(PATIENCE)
    who = f"rank {rank}: " if rank > 0 else ""
    print(f"{who}{error}\n{verdict([Fault(str(error))])}", flush=True)
    return NOT_IN_ORDER


def main(argv: list[str] | None = None) -> int:
    """The exit code of --help and of wrong flags; a check ends the process with its own."""
    escape_unencodable()
    argv = sys.argv[1:] if argv is None else argv
    if not argv or any(word in ("-h", "--help") for word in argv):
        print((__doc__ or "").strip())
        return 0 if argv else NOT_IN_ORDER
    try:
        lines, code = check(argv)
    except UserError as error:
        return print_error(error, rough_launch().rank)
    print("".join(f"{line}\n" for line in lines), end="", flush=True)
    sys.stderr.flush()
    os._exit(code)  # threads that wait for others may never come back


if __name__ == "__main__":
    sys.exit(main())
