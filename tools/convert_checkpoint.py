"""Convert checkpoints to and from other programs' formats, without building a model, with any number of ranks:

    python tools/convert_checkpoint.py --load RUN [--ckpt-step N] --to-huggingface FOLDER [--dtype bf16]
    python tools/convert_checkpoint.py --from-huggingface FOLDER --save RUN
    torchrun --nproc-per-node 8 tools/convert_checkpoint.py ...        # or srun: each rank reads and writes an equal share

The first writes config.json, safetensors files and the tokenizer's files, which transformers loads (GPT-2, Llama, Mistral, Qwen2 or Qwen3,
as the model's flags allow). The others write a weights-only checkpoint of iteration 0 and RUN/model.json with the model's flags: train on
from it with --config RUN/model.json --load RUN --finetune. Weights keep the precision that they have there. Nothing that is read is
executed, and no tensor is held as a whole. Folders lie on a file system that all ranks share.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.checkpoint.foreign import Pair, check_shapes, own_share  # noqa: E402
from megatron.checkpoint.huggingface import from_huggingface, to_huggingface  # noqa: E402
from megatron.checkpoint.huggingface_files import open_folder, read_json, take_rules, write_folder  # noqa: E402
from megatron.checkpoint.manifest import list_iterations  # noqa: E402
from megatron.checkpoint.ranks import Ranks  # noqa: E402
from megatron.checkpoint.reader import TORCH_DTYPES, Checkpoint, find_checkpoint  # noqa: E402
from megatron.checkpoint.writer import save_checkpoint  # noqa: E402
from megatron.config.groups import Config, DataConfig, ModelConfig, PrecisionConfig  # noqa: E402
from megatron.data.tokenizer import build_tokenizer  # noqa: E402
from megatron.dist.groups import Axis  # noqa: E402
from megatron.dist.setup import connect, disconnect, read_launch, share_cores  # noqa: E402
from megatron.dist.together import together  # noqa: E402

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
TIMEOUT = 120  # minutes that a rank waits for the others' shares


def export(load: str, step: int | None, target: Path, dtype: torch.dtype | None, ranks: Ranks) -> list[str]:
    """Write `target` in Hugging Face's format; returns lines to show. Raises ValueError naming what stands in the way."""

    def find() -> str | None:
        if not ranks.first:
            return None
        if target.exists() and any(target.iterdir()):
            raise ValueError(f"--to-huggingface {target}: exists and is not empty; give a new folder")
        path = find_checkpoint(load, step)
        if path is None:
            raise ValueError(f"--load {load}: no checkpoint there")
        return str(path)

    path = ranks.agree(find)[0]
    with together(ranks.world, ranks.device):
        checkpoint = Checkpoint(path)
        config = Config.from_dict(checkpoint.state["config"])
        described, rules = to_huggingface(config.model, checkpoint.state["vocab_size"])
    if dtype is None:
        stored = TORCH_DTYPES[checkpoint.tensors["embedding.word.weight"].dtype]
        dtype = torch.bfloat16 if config.precision.bf16 else torch.float16 if config.precision.fp16 else stored
    described |= {"torch_dtype": str(dtype).removeprefix("torch.")}

    def beside_weights(folder: Path) -> list[str]:
        notes = _tokenizer_files(config.data, folder, described)
        (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        return notes

    with checkpoint:
        notes = write_folder(target, checkpoint, rules, dtype, beside_weights, ranks)
    return [f"{path} -> {target}: {described['architectures'][0]}, {described['torch_dtype']}", *notes]


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


@dataclass(frozen=True)
class Foreign:
    """A model of another program: its flags, its weights where they lie, and what becomes of the rest."""

    fields: dict[str, Any]  # of ModelConfig
    data: DataConfig
    pairs: list[Pair]
    format: str
    notes: tuple[str, ...] = ()


def open_huggingface(folder: Path) -> Foreign:
    """Raises ValueError naming what has no counterpart here."""
    described = read_json(folder / "config.json")
    tensors = open_folder(folder)
    fields, rules = from_huggingface(described, tensors)
    return Foreign(fields, _tokenizer_of(folder), take_rules(rules, tensors), described["model_type"])


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


def take_over(source: Path, foreign: Foreign, save: str, ranks: Ranks) -> list[str]:
    """Write a model of another program as iteration 0 under `save`, each rank its share; returns lines to show. Raises ValueError."""
    word = next(tensor for box, tensor in foreign.pairs if box.name == "embedding.word.weight")
    vocab_size = next(box.shape[0] for box, _ in foreign.pairs if box.name == "embedding.word.weight")
    with together(ranks.world, ranks.device):
        if ranks.first and list_iterations(Path(save)):
            raise ValueError(f"--save {save}: holds checkpoints already; give a new folder")
        model = ModelConfig(**foreign.fields)
        check_shapes(foreign.pairs, model, vocab_size)
    precision = PrecisionConfig(bf16=word.dtype == torch.bfloat16, fp16=word.dtype == torch.float16, fp64=word.dtype == torch.float64)
    config = Config(model=model, data=foreign.data, precision=precision)
    state = {
        "iteration": 0, "consumed_samples": 0, "config": config.to_dict(), "vocab_size": vocab_size, "tokenizer": None,
        "source": {"format": foreign.format, "folder": source.name},
    }
    path = save_checkpoint(save, 0, own_share(foreign.pairs, ranks.world.rank, ranks.world.size), state, ranks=ranks)
    model_json = Path(save) / "model.json"
    if ranks.first:
        model_json.write_text(json.dumps({"model": foreign.fields}, indent=2) + "\n")
    count = len({box.name for box, _ in foreign.pairs})
    return [f"{source} -> {path}: {count} tensors, {str(word.dtype).removeprefix('torch.')}, vocabulary {vocab_size}", *foreign.notes,
            f"train on from it with: --config {model_json} --load {save} --finetune"]


def convert(flags: argparse.Namespace, ranks: Ranks) -> list[str]:
    """Carry out what the flags say; returns lines to show. Raises ValueError."""
    if flags.to_huggingface:
        return export(flags.load, flags.ckpt_step, flags.to_huggingface, PRECISIONS.get(flags.dtype), ranks)
    with together(ranks.world, ranks.device):
        foreign = open_huggingface(flags.from_huggingface)
    return take_over(flags.from_huggingface, foreign, flags.save, ranks)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument("--to-huggingface", metavar="FOLDER", type=Path, help="write this folder")
    direction.add_argument("--from-huggingface", metavar="FOLDER", type=Path, help="read this folder")
    parser.add_argument("--load", help="checkpoints to export")
    parser.add_argument("--ckpt-step", type=int, help="iteration to export; default: the newest")
    parser.add_argument("--dtype", choices=PRECISIONS, help="precision of the export; default: the one that the run computed in")
    parser.add_argument("--save", help="where the imported checkpoint goes")
    flags = parser.parse_args(argv)
    exports = flags.to_huggingface is not None
    foreign = [flags.save] if exports else [flags.load, flags.ckpt_step, flags.dtype]
    if (flags.load if exports else flags.save) is None or any(value is not None for value in foreign):
        parser.error("--to-huggingface takes --load, --ckpt-step and --dtype; --from-huggingface takes --save")
    return flags


def main(argv: list[str] | None = None) -> int:
    flags = parse(argv)
    rank = 0
    try:
        launch = read_launch()
        rank = launch.rank
        if launch.local_size > 1:
            share_cores(launch)
        connect(launch, "gloo", TIMEOUT, {name: str(value) for name, value in vars(flags).items()})
        lines = convert(flags, Ranks(Axis("world", rank, tuple(range(launch.world_size)))))
        disconnect()
    except (ValueError, OSError) as error:
        if getattr(error, "rank", 0) == 0:  # what every rank knows is said once
            print(f"error: {error}", file=sys.stderr)
        return 2
    if rank == 0:
        print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
