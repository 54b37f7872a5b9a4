"""A signal during startup is logged and ends the process with the exit code that it has later."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import rank_environment

from megatron.config.groups import TrainingConfig
from megatron.training.exit import ExitConditions, exit_on_signals

ROOT = Path(__file__).resolve().parents[3]
FLAGS = """--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8
--micro-batch-size 1 --global-batch-size 2 --mock-data
--tokenizer-type NullTokenizer --vocab-size 15 --lr 1e-3 --train-iters 1""".split()


def test_a_rank_that_waits_for_another():
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "pretrain_gpt.py", *FLAGS]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=rank_environment(0, 2, port),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None:
        try:
            socket.create_connection(("localhost", port)).close()
            break
        except OSError:
            time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert errors == "received SIGTERM during startup; exiting without a checkpoint\n"


@pytest.mark.parametrize("launcher_ignores_term", [False, True])
def test_a_second_signal_meets_the_handler_from_before(monkeypatch, launcher_ignores_term):
    """Of the launcher, which may ignore SIGTERM: the checkpoint of the first one is written."""
    met, ended = [], []
    monkeypatch.setattr(os, "_exit", ended.append)
    before = {
        number: signal.signal(number, lambda number, frame: met.append(number))
        for number in (signal.SIGTERM, signal.SIGUSR1)
    }
    if launcher_ignores_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    expected = [] if launcher_ignores_term else [signal.SIGTERM]
    try:
        with exit_on_signals():
            time.sleep(0.01)
            exits = ExitConditions(TrainingConfig(exit_duration_in_mins=0.01 / 60))
            assert exits.requests()[-1]  # the start-up counts
            for _ in range(2):
                signal.raise_signal(signal.SIGTERM)
            assert exits.received is signal.SIGTERM and met == expected
            exits.close()
            with exit_on_signals():
                signal.raise_signal(signal.SIGUSR1)
            assert ended == [85]
        signal.raise_signal(signal.SIGUSR1)
        assert met == [*expected, signal.SIGUSR1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
