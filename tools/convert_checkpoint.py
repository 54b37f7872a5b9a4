"""Convert checkpoints to and from Hugging Face's format, without building a model:

    python tools/convert_checkpoint.py --load RUN [--ckpt-step N] --to-huggingface FOLDER [--dtype bf16]
    python tools/convert_checkpoint.py --from-huggingface FOLDER --save RUN

The first writes config.json, safetensors files and the tokenizer's files, which transformers loads (GPT-2, Llama, Mistral, Qwen2 or Qwen3,
as the model's flags allow). The second writes a weights-only checkpoint of iteration 0 and RUN/model.json with the model's flags: train on
from it with --config RUN/model.json --load RUN --finetune. Weights keep the precision that they have there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.checkpoint.huggingface import from_huggingface, to_huggingface  # noqa: E402
from megatron.checkpoint.manifest import list_iterations  # noqa: E402
from megatron.checkpoint.reader import Checkpoint, find_checkpoint  # noqa: E402
from megatron.checkpoint.writer import save_checkpoint  # noqa: E402
from megatron.config.groups import Config, DataConfig, ModelConfig, PrecisionConfig  # noqa: E402
from megatron.data.tokenizer import build_tokenizer  # noqa: E402
from megatron.model.layout import Box  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
SHARD = 2 << 30  # bytes of one exported file, and of the memory that the export takes


def export(load: str, step: int | None, target: Path, dtype: torch.dtype | None) -> list[str]:
    """Write `target` in Hugging Face's format; returns lines to show. Raises ValueError naming what stands in the way."""
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"--to-huggingface {target}: exists and is not empty; give a new folder")
    path = find_checkpoint(load, step)
    if path is None:
        raise ValueError(f"--load {load}: no checkpoint there")
    with Checkpoint(path) as checkpoint:
        config = Config.from_dict(checkpoint.state["config"])
        if dtype is None:
            stored = checkpoint.tensors["embedding.word.weight"].dtype
            dtype = torch.bfloat16 if config.precision.bf16 else torch.float16 if config.precision.fp16 else stored
        described, tensors = to_huggingface(config.model, checkpoint.state["vocab_size"], checkpoint)
        described |= {"torch_dtype": str(dtype).removeprefix("torch.")}
        target.parent.mkdir(parents=True, exist_ok=True)
        # A folder that appears under its name is complete.
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            notes = _tokenizer_files(config.data, temporary, described)
            weights = [stored for name, stored in checkpoint.tensors.items() if not name.startswith("optimizer.")]
            total = sum(stored.dtype.itemsize * torch.Size(stored.shape).numel() for stored in weights)
            _write_files(temporary, _reported("exported", tensors, total), dtype)
            (temporary / "config.json").write_text(json.dumps(described, indent=2) + "\n")
            temporary.chmod(0o755 & ~_umask())
            os.rename(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return [f"{path} -> {target}: {described['architectures'][0]}, {described['torch_dtype']}", *notes]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_files(folder: Path, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
    """model.safetensors, or model-00001-of-0000N.safetensors and their index."""
    from safetensors.torch import save_file

    parts: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        save_file(held, folder / f"{len(parts)}.part", {"format": "pt"})
        parts.append(list(held))
        held.clear()

    size = 0
    for name, tensor in tensors:
        tensor = tensor.to(dtype)
        if held and size + tensor.nbytes > SHARD:
            flush()
            size = 0
        held[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    names = ["model.safetensors"] if len(parts) == 1 else [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    for i, name in enumerate(names):
        os.rename(folder / f"{i}.part", folder / name)
    if len(parts) > 1:
        weight_map = {key: name for name, keys in zip(names, parts, strict=True) for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _tokenizer_files(data: DataConfig, folder: Path, described: dict[str, Any]) -> list[str]:
    """Copy the tokenizer where Hugging Face looks for it and set the end-of-document id; returns lines to show."""
    try:
        tokenizer = build_tokenizer(data)
    except ValueError as error:
        return [f"note: no tokenizer was copied and eos_token_id is empty: {error}"]
    described["eos_token_id"] = tokenizer.eod
    given = {
        "HuggingFaceTokenizer": [(data.tokenizer_model, "tokenizer.json")],
        "SentencePieceTokenizer": [(data.tokenizer_model, "tokenizer.model")],
        "GPT2BPETokenizer": [(data.vocab_file, "vocab.json"), (data.merge_file, "merges.txt")],
    }.get(data.tokenizer_type, [])
    for source, name in given:
        source = Path(source) / name if Path(source).is_dir() else Path(source)
        shutil.copyfile(source, folder / name)
        for extra in ("tokenizer_config.json", "special_tokens_map.json"):
            if source.with_name(extra).is_file() and source.name == name:
                shutil.copyfile(source.with_name(extra), folder / extra)
    return [] if given else [f"note: {tokenizer.name} has no file that Hugging Face reads; none was copied"]


def take_over(source: Path, save: str) -> list[str]:
    """Write the Hugging Face model in `source` as iteration 0 under `save`; returns lines to show. Raises ValueError."""
    if list_iterations(Path(save)):
        raise ValueError(f"--save {save}: holds checkpoints already; give a new folder")
    described = _json(source / "config.json")
    with ExitStack() as stack:
        tensors = _SafetensorsFolder(source, stack)
        fields, logical = from_huggingface(described, tensors)
        pairs = [(Box(name, tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape)), tensor) for name, tensor in logical]
        dtype = pairs[0][1].dtype
        precision = PrecisionConfig(bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16, fp64=dtype == torch.float64)
        config = Config(model=ModelConfig(**fields), data=_tokenizer_of(source), precision=precision)
        vocab_size = next(box.shape[0] for box, _ in pairs if box.name == "embedding.word.weight")
        state = {
            "iteration": 0, "consumed_samples": 0, "config": config.to_dict(), "vocab_size": vocab_size, "tokenizer": None,
            "source": {"model_type": described["model_type"], "folder": source.name},
        }
        path = save_checkpoint(save, 0, pairs, state)
    model_json = Path(save) / "model.json"
    model_json.write_text(json.dumps({"model": fields}, indent=2) + "\n")
    return [f"{source} -> {path}: {len(pairs)} tensors, {str(dtype).removeprefix('torch.')}, vocabulary {vocab_size}",
            f"train on from it with: --config {model_json} --load {save} --finetune"]


def _tokenizer_of(folder: Path) -> DataConfig:
    """The tokenizer whose files lie in a Hugging Face folder."""
    names = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")
    found = {name: str(folder / name) for name in names if (folder / name).is_file()}
    if "tokenizer.json" in found:
        return DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=found["tokenizer.json"])
    if "vocab.json" in found and "merges.txt" in found:
        return DataConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=found["vocab.json"], merge_file=found["merges.txt"])
    if "tokenizer.model" in found:
        return DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=found["tokenizer.model"])
    return DataConfig()


class _SafetensorsFolder(dict):
    """The tensors of model.safetensors or of an index's files, memory-mapped when they are asked for."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        from safetensors import SafetensorError, safe_open

        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(_json(index).get("weight_map", {}).values()))
        elif (folder / "model.safetensors").is_file():
            names = ["model.safetensors"]
        else:
            fix = "pickled weights are not read: save them again with transformers' save_pretrained"
            raise ValueError(f"--from-huggingface {folder}: no model.safetensors ({fix})")
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"{index}: {name!r} is not a plain file name")
            try:
                file = stack.enter_context(safe_open(folder / name, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{folder / name}: cannot be read: {error}") from error
            self.update(dict.fromkeys(file.keys(), file))

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(name).get_tensor(name)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object")
    return content


def _reported(verb: str, tensors: Iterable[tuple[str, Tensor]], total: int) -> Iterator[tuple[str, Tensor]]:
    """The same tensors; every 5 seconds a line with the share done and the time left."""
    begin = last = time.monotonic()
    done = 0
    for name, tensor in tensors:
        yield name, tensor
        done += tensor.nbytes
        now = time.monotonic()
        if now - last > 5:
            last = now
            left = (now - begin) * (total / done - 1)
            print(f"{verb} {done / 2**30:.1f} of {total / 2**30:.1f} GiB, {left:.0f} s left", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument("--to-huggingface", metavar="FOLDER", type=Path, help="write this folder")
    direction.add_argument("--from-huggingface", metavar="FOLDER", type=Path, help="read this folder")
    parser.add_argument("--load", help="checkpoints to export")
    parser.add_argument("--ckpt-step", type=int, help="iteration to export; default: the newest")
    parser.add_argument("--dtype", choices=DTYPES, help="precision of the export; default: the one that the run computed in")
    parser.add_argument("--save", help="where the imported checkpoint goes")
    flags = parser.parse_args(argv)
    exports = flags.to_huggingface is not None
    foreign = [flags.save] if exports else [flags.load, flags.ckpt_step, flags.dtype]
    if (flags.load if exports else flags.save) is None or any(value is not None for value in foreign):
        parser.error("--to-huggingface takes --load, --ckpt-step and --dtype; --from-huggingface takes --save")
    try:
        if exports:
            lines = export(flags.load, flags.ckpt_step, flags.to_huggingface, DTYPES.get(flags.dtype))
        else:
            lines = take_over(flags.from_huggingface, flags.save)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"error: {error}: install the extra `hf` (safetensors)", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
