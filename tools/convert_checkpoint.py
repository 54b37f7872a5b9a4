r"""Convert checkpoints to and from other programs' formats, without building a model, with any
number of ranks:

    python tools/convert_checkpoint.py --load RUN [--ckpt-step N] --to-huggingface FOLDER \
        [--dtype bf16] [--model-type TYPE]
    python tools/convert_checkpoint.py --from-huggingface FOLDER --save RUN \
        [--vocab-size N]
    python tools/convert_checkpoint.py --from-megatron FOLDER --save RUN [--config FILE] \
        [--vocab-size N]
    python tools/convert_checkpoint.py --from-deepspeed FOLDER --save RUN [--qkv-order ORDER] \
        [--config FILE] [--vocab-size N]
    # with torchrun or srun each rank reads and writes an equal share
    torchrun --nproc-per-node 8 tools/convert_checkpoint.py ...

The first writes config.json, safetensors files and the tokenizer's files, which transformers loads,
as a model of a family that computes the same (docs/checkpoint.md lists them). The others write a
weights-only checkpoint of iteration 0 and RUN/model.json with the model's flags: train on from it
with --config RUN/model.json --load RUN --finetune. --from-megatron reads GPT models of Megatron-LM
(torch_dist, and mp_rank_* folders of core models), and those that torch.distributed.checkpoint
wrote under the same names; the model's flags are those kept there, or --config. --from-deepspeed
reads the fp32 master weights in folders of ZeRO stages 1 to 3: of Hugging Face models (with the
model's config.json in FOLDER, as its Trainer leaves it) and of Megatron-DeepSpeed's GPT, which
needs --qkv-order and takes --config and --vocab-size as --from-megatron does. Weights keep the
precision that they have there. Nothing that is read is executed, and no tensor is held as a whole.
Folders lie on a file system that all ranks share.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a file of a checkout
    import _checkout  # noqa: F401

from megatron.tools._convert.dcp_folder import dcp_tensors  # noqa: E402
from megatron.tools._convert.huggingface import (
    export_notes,
    from_huggingface,
    head_names,
    left_out,
    to_huggingface,
)
from megatron.tools._convert.huggingface_files import (
    open_folder,
    read_json,
    take_parts,
    take_rules,
    without_copied_head,
    write_folder,
)  # noqa: E402
from megatron.tools._convert.megatron_arguments import (
    argument_notes,
    model_fields,
    stores_norms_minus_one,
)
from megatron.tools._convert.megatron_deepspeed import (
    is_megatron,
    map_ranks,
    megatron_arguments,
    tensor_parallel_size,
)  # noqa: E402
from megatron.tools._convert.megatron_lm import embedding_rows, map_tensors
from megatron.tools._convert.models import Pair, check_shapes, first_rows
from megatron.tools._convert.mp_ranks import MpRanks  # noqa: E402
from megatron.tools._convert.pickles import read_torch_file  # noqa: E402
from megatron.tools._convert.zero_folder import ZeroFolder, find_folder  # noqa: E402

from megatron.checkpoint.manifest import list_iterations  # noqa: E402
from megatron.checkpoint.ranks import Ranks  # noqa: E402
from megatron.checkpoint.reader import TORCH_DTYPES, open_checkpoint  # noqa: E402
from megatron.checkpoint.run_state import config_of  # noqa: E402
from megatron.checkpoint.writer import own_part, save_checkpoint  # noqa: E402
from megatron.config.arguments import parse_arguments  # noqa: E402
from megatron.config.derive import derive  # noqa: E402
from megatron.config.errors import UserError  # noqa: E402
from megatron.config.groups import Config, DataConfig, ModelConfig, PrecisionConfig  # noqa: E402
from megatron.config.metadata import flag_name  # noqa: E402
from megatron.config.model import GATED  # noqa: E402
from megatron.config.streams import escape_unencodable  # noqa: E402
from megatron.data.tokenizer import build_tokenizer  # noqa: E402
from megatron.distributed.groups import Axis  # noqa: E402
from megatron.distributed.logs import job_log  # noqa: E402
from megatron.distributed.rank_errors import raise_on_all_ranks  # noqa: E402
from megatron.distributed.setup import connect, disconnect, read_launch, share_cores  # noqa: E402
from megatron.model.spec import Holder  # noqa: E402

PRECISIONS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
TIMEOUT = 120  # minutes that a rank waits for the others' shares
WEIGHTS_ONLY = "note: weights only: optimizer, schedule and random state stay behind"
QWEN2_TOKENIZER = (
    "note: transformers 5 splits text by Qwen's rules for model type qwen2, whatever the "
    "tokenizer: load it by the class in tokenizer_config.json instead of AutoTokenizer, or export "
    "with --model-type seed_oss"
)
ROTARY = (
    "note: Megatron-DeepSpeed since change #441 rotates q and k by cos(angle) instead of the "
    "angle unless it ran with sequence parallelism: "
    "such a model computes something else here; compare the loss before you train on"
)


def export(
    load: str,
    step: int | None,
    target: Path,
    dtype: torch.dtype | None,
    ranks: Ranks,
    kind: str | None = None,
) -> list[str]:
    """Write `target` in Hugging Face's format, as a model of type `kind` or of the first family
    that computes the model; returns lines to show. Raises UserError naming what prevents it.
    """

    if ranks.from_first(lambda: target.exists() and any(target.iterdir())):
        ranks.refuse(
            UserError(f"--to-huggingface {target}: exists and is not empty; give a new folder")
        )
    checkpoint = open_checkpoint(load, step, ranks)
    with raise_on_all_ranks(ranks.world):
        if checkpoint is None:
            raise UserError(f"--load {load}: no checkpoint there")
        config = config_of(checkpoint.state)
        described, rules = to_huggingface(config.model, checkpoint.state["vocab_size"], kind=kind)
    if dtype is None and config.precision.bf16:
        dtype = torch.bfloat16
    elif dtype is None and config.precision.fp16:
        dtype = torch.float16
    elif dtype is None:
        dtype = TORCH_DTYPES[checkpoint.tensors["embedding.word.weight"].dtype]
    described |= {"torch_dtype": str(dtype).removeprefix("torch.")}

    def write_extras(folder: Path) -> list[str]:
        known = checkpoint.state.get("tokenizer")
        notes = _tokenizer_files(config.data, known, folder, described)
        (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        return notes

    with checkpoint:
        notes = write_folder(target, checkpoint, rules, dtype, write_extras, ranks)
    architecture, written = described["architectures"][0], described["torch_dtype"]
    return [
        f"{checkpoint.path} -> {target}: {architecture}, {written}",
        *export_notes(config.model),
        *notes,
    ]


def _tokenizer_files(
    data: DataConfig, known: str | None, folder: Path, described: dict[str, Any]
) -> list[str]:
    """Write the tokenizer as transformers reads it and set the end-of-document id; returns lines to
    show. `known`: the fingerprint of the run's tokenizer, None for an imported model.
    """
    lacking = "note: no tokenizer was copied and eos_token_id is empty"
    try:
        tokenizer = build_tokenizer(data)
    except UserError as error:
        return [f"{lacking}: {error}"]
    if known is not None and tokenizer.fingerprint != known:
        return [f"{lacking}: the files of {tokenizer.name} are not those of the run"]
    described["eos_token_id"] = tokenizer.eod

    # 1. The vocabulary. Several model types read GPT-2's two files by other rules.
    if data.tokenizer_type == "HuggingFaceTokenizer":
        _copy_tokenizer(Path(data.tokenizer_model), folder / "tokenizer.json")
    elif data.tokenizer_type == "SentencePieceTokenizer":
        _copy_tokenizer(Path(data.tokenizer_model), folder / "tokenizer.model")
    elif data.tokenizer_type == "GPT2BPETokenizer":
        import tokenizers

        model = tokenizers.ByteLevelBPETokenizer.from_file(data.vocab_file, data.merge_file)
        model.save(str(folder / "tokenizer.json"))
    else:
        return [f"note: {tokenizer.name} has no file that Hugging Face reads; none was copied"]

    # 2. The class that reads it: where none is named, transformers takes that of the model type.
    settings = folder / "tokenizer_config.json"
    if not settings.exists():
        is_sentencepiece = data.tokenizer_type == "SentencePieceTokenizer"
        make = _sentencepiece_config if is_sentencepiece else _fast_config
        settings.write_text(json.dumps(make(folder, tokenizer.eod), indent=2) + "\n")
    reader = str(read_json(settings).get("tokenizer_class"))
    if described["model_type"] == "qwen2" and not reader.startswith("Qwen2"):
        return [QWEN2_TOKENIZER]
    return []


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a tokenizer's file, and the settings next to it if transformers would read them."""
    source = source / target.name if source.is_dir() else source
    shutil.copyfile(source, target)
    for extra in ("tokenizer_config.json", "special_tokens_map.json"):
        if source.with_name(extra).is_file() and source.name == target.name:
            shutil.copyfile(source.with_name(extra), target.with_name(extra))


def _fast_config(folder: Path, eod: int) -> dict[str, Any]:
    """What transformers must know to encode by the folder's tokenizer.json alone."""
    import tokenizers

    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": model.id_to_token(eod)}


def _sentencepiece_config(folder: Path, eod: int) -> dict[str, Any]:
    """What transformers must know to encode as the folder's tokenizer.model does."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ids = {"bos_token": model.bos_id(), "unk_token": model.unk_id(), "eos_token": eod}
    # Some models put a space before every text; transformers then puts none before a text that
    # begins with one.
    prefix = model.encode("a", out_type=str)[0].startswith("\u2581")
    return {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_prefix_space": prefix,
        "add_bos_token": False,
        "add_eos_token": False,
        **{name: model.id_to_piece(token) for name, token in ids.items() if token >= 0},
    }


@dataclass(frozen=True)
class Foreign:
    """A model of another program: its flags, its weights where they lie, and what becomes of the
    rest.
    """

    fields: dict[str, Any]  # of ModelConfig
    data: DataConfig
    pairs: list[Pair]
    format: str
    notes: tuple[str, ...] = ()


def open_huggingface(folder: Path, vocab_size: int | None) -> Foreign:
    """A Hugging Face folder, of whose vocabulary the first `vocab_size` rows are taken. Raises
    UserError naming what has no counterpart here.
    """
    described = read_json(folder / "config.json")
    tensors = without_copied_head(described, open_folder(folder))
    fields, rules = from_huggingface(described, tensors)
    return Foreign(
        fields,
        _tokenizer_of(folder),
        first_rows(take_rules(rules, tensors), vocab_size),
        described["model_type"],
        left_out(described, tensors),
    )


def _tokenizer_of(folder: Path) -> DataConfig:
    """The tokenizer whose files lie in a Hugging Face folder."""
    names = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")
    found = {name: str(folder / name) for name in names if (folder / name).is_file()}
    if "tokenizer.json" in found:
        return DataConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=found["tokenizer.json"]
        )
    if "vocab.json" in found and "merges.txt" in found:
        return DataConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=found["vocab.json"],
            merge_file=found["merges.txt"],
        )
    if "tokenizer.model" in found:
        return DataConfig(
            tokenizer_type="SentencePieceTokenizer", tokenizer_model=found["tokenizer.model"]
        )
    return DataConfig()


def open_megatron(folder: Path, config: str | None, vocab_size: int | None) -> Foreign:
    """A folder of Megatron-LM (or the folder of a run, whose tracker file names it). Raises
    UserError naming what has no counterpart here.
    """
    folder = _megatron_iteration(folder)
    ranks = None if (folder / ".metadata").exists() else MpRanks(folder)
    args = _arguments(folder, ranks, needed=config is None)
    fields = model_fields(args) if config is None else _given_fields(config, vocab_size)
    model = ModelConfig(**fields)
    if ranks is None:
        tensors = dcp_tensors(folder)
    else:
        tied = not model.untie_embeddings_and_output_weights
        tensors = ranks.tensors(gated=model.activation in GATED, tied=tied)
    rows = embedding_rows(folder, tensors, vocab_size)
    minus_one = stores_norms_minus_one(args)
    pairs = map_tensors(model, vocab_size or rows, tensors, norms_minus_one=minus_one)
    notes = argument_notes(args) if config is None else ()
    notes = (WEIGHTS_ONLY, *_padding_note(vocab_size, rows), *notes)
    return Foreign(fields, DataConfig(), pairs, "mp_rank" if ranks else "torch_dist", notes)


def _given_fields(config: str, vocab_size: int | None) -> dict[str, Any]:
    """The fields of ModelConfig that a file of flags gives."""
    given = derive(parse_arguments(["--config", config]).config, 1, vocab_size).config.model
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    missing = [flag_name(name) for name in sizes if getattr(given, name) is None]
    if missing:
        raise UserError(f"--config {config}: lacks the model's {', '.join(missing)}")
    return {
        field.name: getattr(given, field.name)
        for field in dataclasses.fields(given)
        if getattr(given, field.name) != field.default
    }


def _padding_note(vocab_size: int | None, rows: int) -> tuple[str, ...]:
    if vocab_size:
        return ()
    return (
        f"note: all {rows} rows of the vocabulary are kept, padding too; --vocab-size N keeps the "
        "first N",
    )


def open_deepspeed(
    given: Path, config: str | None, vocab_size: int | None, qkv_order: str | None
) -> Foreign:
    """A folder of DeepSpeed with ZeRO's partitions. Raises UserError naming what has no counterpart
    here.
    """
    folder = find_folder(given)
    zero = ZeroFolder(folder)
    names = {name.removeprefix("module."): name for rank in zero.ranks for name in rank}
    if is_megatron(set(names)):
        return _megatron_deepspeed(zero, folder, config, vocab_size, qkv_order)
    options = {"--config": config, "--vocab-size": vocab_size, "--qkv-order": qkv_order}
    flags = [flag for flag, value in options.items() if value is not None]
    if flags:
        raise UserError(
            f"{folder}: its tensors have no names of Megatron-DeepSpeed: drop {' and '.join(flags)}"
        )
    return _huggingface_deepspeed(zero, names, given, folder)


def _huggingface_deepspeed(
    zero: ZeroFolder, names: dict[str, str], given: Path, folder: Path
) -> Foreign:
    """A Hugging Face model; `names`: its tensors, and what ZeRO's partitions call them."""
    if len(zero.ranks) > 1:
        raise UserError(
            f"{folder}: a Hugging Face model of {len(zero.ranks)} tensor-parallel ranks "
            "is not read: save it without AutoTP"
        )
    places = [
        place for place in (given, folder, folder.parent) if (place / "config.json").is_file()
    ]
    if not places:
        raise UserError(
            f"{given}: no config.json there: put that of the Hugging Face model next to "
            "the folder of the partitions"
        )
    described = read_json(places[0] / "config.json")
    # 1. A head that is the embedding itself is not read.
    held, head = zero.ranks[0], head_names(described, names)
    if head is not None:
        embedding, copy = (held.get(names.get(name, "")) for name in head)
        if embedding is copy:
            names = {name: theirs for name, theirs in names.items() if name != head[1]}

    # 2. The other tensors, by the rules of the model type.
    fields, rules = from_huggingface(described, names)
    return Foreign(
        fields,
        _tokenizer_of(places[0]),
        take_parts(rules, {name: held[theirs] for name, theirs in names.items()}),
        f"deepspeed {described['model_type']}",
        (WEIGHTS_ONLY, *left_out(described, names)),
    )


def _megatron_deepspeed(
    zero: ZeroFolder,
    folder: Path,
    config: str | None,
    vocab_size: int | None,
    qkv_order: str | None,
) -> Foreign:
    """A model of Megatron-DeepSpeed."""
    if qkv_order is None:
        raise UserError(
            f"{folder}: Megatron-DeepSpeed has laid the rows of query_key_value in two ways "
            "and does not record in which: give --qkv-order "
            "grouped (its code before 4 December 2024, change #441) or --qkv-order stacked "
            "(since then)"
        )
    tp = tensor_parallel_size(folder, zero.states)
    args = zero.states[0].get("args")
    if config is None:
        fields = model_fields(megatron_arguments(args))
    else:
        fields = _given_fields(config, vocab_size)
    model, stacked = ModelConfig(**fields), qkv_order == "stacked"
    minus_one = stores_norms_minus_one(args)
    pairs, rows = map_ranks(folder, zero.ranks, tp, model, vocab_size, stacked, minus_one)
    rotates = stacked and model.position_embedding_type == "rope"
    notes = (WEIGHTS_ONLY, *_padding_note(vocab_size, rows), *([ROTARY] if rotates else []))
    return Foreign(fields, DataConfig(), pairs, "megatron-deepspeed", notes)


def _arguments(folder: Path, ranks: MpRanks | None, *, needed: bool) -> Any:
    """The arguments of the run that wrote a folder of Megatron-LM; None where there are none and
    they are not `needed`.
    """
    try:
        return _common_arguments(folder) if ranks is None else ranks.args
    except UserError:
        if needed:
            raise
        return None


def _common_arguments(folder: Path) -> Any:
    if not (folder / "common.pt").is_file():
        raise UserError(f"{folder}: has no common.pt: give the model's flags with --config FILE")
    common = read_torch_file(folder / "common.pt")
    if not isinstance(common, dict) or "args" not in common:
        raise UserError(
            f"{folder / 'common.pt'}: holds no arguments: give the model's flags with --config FILE"
        )
    return common["args"]


def _megatron_iteration(folder: Path) -> Path:
    """The folder itself when it holds a checkpoint of Megatron-LM, else the one that its tracker
    file names.
    """

    def holds(path: Path) -> bool:
        return (path / ".metadata").exists() or any(path.glob("mp_rank_*"))

    tracker = folder / "latest_checkpointed_iteration.txt"
    if not holds(folder) and tracker.is_file():
        word = tracker.read_text().strip()
        folder = folder / (f"iter_{int(word):07d}" if word.isdecimal() else "release")
    if not holds(folder):
        raise UserError(
            f"--from-megatron {folder}: neither .metadata (torch_dist) nor mp_rank_* there: "
            "not a checkpoint of Megatron-LM"
        )
    return folder


def take_over(source: Path, foreign: Foreign, save: str, ranks: Ranks) -> list[str]:
    """Write a model of another program as iteration 0 under `save`, each rank its share; returns
    lines to show. Raises UserError.
    """
    embedding, word = next(
        pair for pair in foreign.pairs if pair[0].name == "embedding.word.weight"
    )
    vocab_size = embedding.shape[0]
    with raise_on_all_ranks(ranks.world):
        if ranks.first and list_iterations(Path(save)):
            raise UserError(f"--save {save}: holds checkpoints already; give a new folder")
        model = ModelConfig(**foreign.fields)
        check_shapes(foreign.pairs, model, vocab_size)
    precision = PrecisionConfig(
        bf16=word.dtype == torch.bfloat16,
        fp16=word.dtype == torch.float16,
        fp64=word.dtype == torch.float64,
    )
    # rows of the embedding that may be more than the tokenizer has ids
    rows = {} if foreign.data.tokenizer_type is None else {"vocab_size": vocab_size}
    data = dataclasses.replace(foreign.data, **rows)
    config = Config(model=model, data=data, precision=precision)
    state = {
        "iteration": 0,
        "consumed_samples": 0,
        "config": config.to_dict(),
        "vocab_size": vocab_size,
        "tokenizer": None,
        "source": {"format": foreign.format, "folder": source.name},
    }
    holder = Holder(ranks.world.rank, ranks.world.size)
    share = own_part(foreign.pairs, lambda box: holder)
    path = save_checkpoint(save, 0, share, state, ranks=ranks)
    model_json = Path(save) / "model.json"
    if ranks.first:
        given = {"model": foreign.fields} | ({"data": rows} if rows else {})
        model_json.write_text(json.dumps(given, indent=2) + "\n")
    count = len({box.name for box, _ in foreign.pairs})
    return [
        (
            f"{source} -> {path}: {count} tensors, {str(word.dtype).removeprefix('torch.')}, "
            f"vocabulary {vocab_size}"
        ),
        *foreign.notes,
        f"train on from it with: --config {model_json} --load {save} --finetune",
    ]


def convert(flags: argparse.Namespace, ranks: Ranks) -> list[str]:
    """Carry out the conversion of the flags; returns lines to show. Raises UserError."""
    if flags.to_huggingface:
        return export(
            flags.load,
            flags.ckpt_step,
            flags.to_huggingface,
            PRECISIONS.get(flags.dtype),
            ranks,
            flags.model_type,
        )
    source = flags.from_huggingface or flags.from_megatron or flags.from_deepspeed
    size = flags.vocab_size
    with raise_on_all_ranks(ranks.world):
        if flags.from_huggingface:
            foreign = open_huggingface(source, size)
        elif flags.from_megatron:
            foreign = open_megatron(source, flags.config, size)
        else:
            foreign = open_deepspeed(source, flags.config, size, flags.qkv_order)
    return take_over(source, foreign, flags.save, ranks)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument(
        "--to-huggingface", metavar="FOLDER", type=Path, help="write this folder"
    )
    direction.add_argument(
        "--from-huggingface", metavar="FOLDER", type=Path, help="read this folder"
    )
    direction.add_argument(
        "--from-megatron",
        metavar="FOLDER",
        type=Path,
        help="read this folder of Megatron-LM, or one iter_* folder in it",
    )
    direction.add_argument(
        "--from-deepspeed",
        metavar="FOLDER",
        type=Path,
        help="read this folder of ZeRO partitions, or the one its `latest` names",
    )
    parser.add_argument("--load", help="checkpoints to export")
    parser.add_argument("--ckpt-step", type=int, help="iteration to export; default: the newest")
    parser.add_argument(
        "--dtype",
        choices=PRECISIONS,
        help="precision of the export; default: the one that the run computed in",
    )
    parser.add_argument(
        "--model-type",
        help="Hugging Face model type of the export (seed_oss, ...); default: the first family "
        "that computes the model",
    )
    parser.add_argument("--save", help="where the imported checkpoint goes")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="the model's flags (JSON, as train runs take it); default: those in the folder",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        help="tokens of the real vocabulary: rows of the embedding beyond them are not imported",
    )
    parser.add_argument(
        "--qkv-order",
        choices=["grouped", "stacked"],
        help="rows of Megatron-DeepSpeed's query_key_value: q, k, v of each head or "
        "query group together (before 4 December 2024), or all q, all k, all v of a rank "
        "(since then)",
    )
    flags = parser.parse_args(argv)
    # what each direction takes: the first is needed
    takes = {
        "to_huggingface": ["load", "ckpt_step", "dtype", "model_type"],
        "from_huggingface": ["save", "vocab_size"],
        "from_megatron": ["save", "config", "vocab_size"],
        "from_deepspeed": ["save", "config", "vocab_size", "qkv_order"],
    }
    given = {name for name, value in vars(flags).items() if value is not None}
    (wanted,) = given & takes.keys()
    needed, *optional = takes[wanted]
    if needed not in given or given - {wanted, needed, *optional}:
        others = "".join(f" [--{name}]" for name in optional)
        text = f"--{wanted} FOLDER takes --{needed}{others} and nothing else"
        parser.error(text.replace("_", "-"))
    return flags


def main(argv: list[str] | None = None) -> int:
    escape_unencodable()
    flags = parse(argv)
    rank = 0
    try:
        launch = read_launch()
        rank = launch.rank
        if launch.local_size > 1:
            share_cores(launch)
        connect(launch, "gloo", TIMEOUT, {name: str(value) for name, value in vars(flags).items()})
        with job_log():
            lines = convert(flags, Ranks(Axis("world", rank, tuple(range(launch.world_size)))))
        disconnect()
    except (UserError, OSError) as error:
        if getattr(error, "rank", 0) == 0:  # what every rank knows is said once
            print(f"error: {error}", file=sys.stderr)
        return 2
    if rank == 0:
        print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
