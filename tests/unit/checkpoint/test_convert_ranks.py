"""Conversion by several ranks: the same bytes as by one, each rank its equal part, little memory,
and no half of a result.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import multiprocessing
import re
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
from checkpoint_cases import same_bits, save_in_shards, whole
from megatron.tools import convert_checkpoint, generate, inspect_checkpoint
from megatron.tools._convert import huggingface_files
from reshard_cases import flags, start
from test_huggingface import difference

from megatron.checkpoint.reader import open_checkpoint
from megatron.config.groups import Config, ModelConfig
from megatron.model.build import logical_tensors

transformers = pytest.importorskip("transformers")


def convert(*words: object) -> tuple[int, str]:
    """The tool on this rank: exit code and what it printed."""
    shown = io.StringIO()
    with (
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(shown),
        mock.patch.object(convert_checkpoint, "disconnect", lambda: None),
    ):
        code = convert_checkpoint.main([str(word) for word in words])
    return code, shown.getvalue()


def convert_on_a_full_disk(*words: object) -> tuple[int, str]:
    """The same when the last rank cannot write."""
    write = huggingface_files._write_at

    def full(file: int, data: torch.Tensor, position: int) -> None:
        if torch.distributed.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, data, position)

    with mock.patch.object(huggingface_files, "_write_at", full):
        return convert(*words)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_of_four_ranks_becomes_one_model_and_comes_back(tmp_path, gloo_world, monkeypatch):
    """Saved by four ranks, exported by one and three, judged by transformers, imported by one and
    two.
    """
    words = (*flags("gqa-untied", "pp2dp2zero2"), "--save", str(tmp_path / "run"))
    texts = gloo_world(4).run(start, (*words, "--train-iters", "2"))
    assert all(text.endswith("exit code 0") for text in texts), "the run failed"
    bytes_by_rank_and_stage_are_shown(tmp_path / "run" / "iter_0000002")
    export = ("--load", tmp_path / "run", "--dtype", "fp64", "--to-huggingface")
    hf = tmp_path / "hf1"
    assert convert(*export, hf)[0] == 0
    shown = gloo_world(3).run(convert, *export, tmp_path / "hf3")
    assert [code for code, _ in shown] == [0] * 3 and files(tmp_path / "hf3") == files(hf)
    them = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype="auto").eval()
    assert them.config.model_type == "qwen3"
    with open_checkpoint(tmp_path / "run") as checkpoint, torch.no_grad():
        monkeypatch.setattr(generate, "compute_dtype", lambda precision: torch.float64)
        ours = generate.load_model(checkpoint, torch.device("cpu"))
        ids = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))
        assert len(checkpoint.shards) == 4
        # transformers computes rotary tables and RMSNorm in fp32
        assert difference(ours.logits(ids), them(ids).logits) < 3e-6

        weights = [name for name in checkpoint.names if not name.startswith("optimizer.")]
        back = ("--from-huggingface", hf, "--save")
        assert convert(*back, tmp_path / "one")[0] == 0
        shown = gloo_world(2).run(convert, *back, tmp_path / "two")
        assert [code for code, _ in shown] == [0, 0]
        for name, shards in (("one", 1), ("two", 2)):
            with open_checkpoint(tmp_path / name) as imported:
                assert [shard.data_bytes > 0 for shard in imported.shards] == [True] * shards
                assert sorted(imported.names) == sorted(weights)
                assert all(
                    same_bits(imported.read_tensor(n), checkpoint.read_tensor(n).double())
                    for n in weights
                )


def bytes_by_rank_and_stage_are_shown(folder: Path) -> None:
    """inspect_checkpoint.py on the checkpoint of two pipeline stages of two ranks each."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert inspect_checkpoint.main([str(folder)]) == 0
    text = shown.getvalue()
    stages = re.findall(
        r"pipeline stage (\d): 2 ranks wrote \S+ MiB; largest / mean (\d\.\d{3})", text
    )
    assert [stage for stage, _ in stages] == ["0", "1"]
    assert len(re.findall(r"rank [0-3]: \S+ MiB in shard-0000[0-3]", text)) == 4
    shards = json.loads((folder / "MANIFEST.json").read_text())["manifest"]["shards"]
    for stage, ratio in stages:
        sizes = [record["bytes"] for record in shards if record["pp"] == int(stage)]
        assert ratio == f"{max(sizes) * len(sizes) / sum(sizes):.3f}"


def run_of(layers: int, hidden: int, heads: int, positions: int, vocab: int) -> tuple[list, dict]:
    """The shard and the state of a random GPT-2."""
    model = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        kv_channels=hidden // heads,
        num_query_groups=heads,
        max_position_embeddings=positions,
    )
    specs = logical_tensors(model, vocab).values()
    tensors = {spec.name: torch.rand(spec.shape) for spec in specs}
    return [[(whole(name, tensor), tensor) for name, tensor in tensors.items()]], {
        "config": Config(model=model).to_dict(),
        "vocab_size": vocab,
    }


def test_a_full_disk_is_found_before_anything_is_written(tmp_path, monkeypatch):
    save_in_shards(tmp_path / "run", 1, *run_of(1, 8, 2, 4, 11))
    monkeypatch.setattr(huggingface_files.shutil, "disk_usage", lambda path: mock.Mock(free=100))
    code, shown = convert("--load", tmp_path / "run", "--to-huggingface", tmp_path / "hf")
    assert code == 2 and "GiB left" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def peak_here(*words: object) -> int:
    """Anonymous memory that the tool takes at its peak above what was held before."""

    def held() -> int:
        return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10

    def sample() -> None:
        while not ended.wait(0.001):
            seen.append(held())

    seen, ended = [held()], threading.Event()
    sampler = threading.Thread(target=sample)
    sampler.start()
    code, shown = convert(*words)
    ended.set()
    sampler.join()
    assert code == 0, shown
    return max(seen) - seen[0]


@pytest.mark.full
def test_no_whole_model_in_memory(tmp_path):
    """Each way in a new process: what earlier tests have freed would hide what is taken."""
    # most of it in an embedding and in matrices that GPT-2 transposes
    shards, state = run_of(1, 1024, 16, 16, 30_000)
    save_in_shards(tmp_path / "run", 1, shards, state)
    size = sum(tensor.nbytes for _, tensor in shards[0])
    for words in (
        ("--load", tmp_path / "run", "--to-huggingface", tmp_path / "hf"),
        ("--from-huggingface", tmp_path / "hf", "--save", tmp_path / "back"),
    ):
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as process:
            assert 1 << 20 < process.submit(peak_here, *words).result() < size / 2
    with open_checkpoint(tmp_path / "run") as run, open_checkpoint(tmp_path / "back") as back:
        assert all(
            same_bits(run.read_tensor(box.name), back.read_tensor(box.name)) for box, _ in shards[0]
        )


def test_a_failed_or_interrupted_export_leaves_nothing_that_looks_complete(
    tmp_path, gloo_world, monkeypatch
):
    save_in_shards(tmp_path / "run", 1, *run_of(1, 8, 2, 4, 11))
    words = ("--load", tmp_path / "run", "--to-huggingface", tmp_path / "hf")
    for code, shown in gloo_world(2).run(convert_on_a_full_disk, *words):
        assert code == 2
        assert not shown or "rank 1: " in shown and "No space left on device" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

    with monkeypatch.context() as patched:  # killed: nothing is cleaned up
        patched.setattr(huggingface_files.shutil, "rmtree", lambda *args, **more: None)
        patched.setattr(huggingface_files, "_write_share", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert(*words)
    (left,) = (path for path in tmp_path.iterdir() if path.name != "run")
    assert left.name.startswith(".hf-") and not (left / "config.json").exists()
    code, shown = convert(*words)
    assert code == 0 and f"{left} is left of an export that was interrupted" in shown
    assert (tmp_path / "hf" / "config.json").exists()
