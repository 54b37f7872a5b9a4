"""Batches as a pure function of the sample number.

`build_data` opens and checks all files of the command line: one `Source` for training, and one for
each validation and test source.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import torch

from megatron.config.data_paths import SPLITS, parse_blend, parse_split
from megatron.config.groups import Config, DataConfig
from megatron.config.input_files import JsonObject
from megatron.config.metadata import flag_name
from megatron.data.blend import PATTERN, Blend, extend_history, quotas
from megatron.data.indexed_dataset import DataError, IndexedDataset
from megatron.data.token_stream import TokenStream, key_of, mix

EVALUATION_SEED = 0  # evaluation reads the same samples whatever --seed is, so that runs compare
MOCK_DOCUMENT = 100  # tokens, its end-of-document included


@dataclass(frozen=True)
class Batch:
    """b samples of s tokens; labels are the tokens one position on."""

    tokens: torch.Tensor  # [b, s] int64
    labels: torch.Tensor  # [b, s] int64
    # [b, s] float32: 0 where the input token is an end of document, under --eod-mask-loss
    loss_mask: torch.Tensor
    position_ids: torch.Tensor  # [b, s] int64
    sample_ids: torch.Tensor  # [b] int64: sample numbers of the run
    # [b, s] int32: where the token's document begins in its sample, under --reset-attention-mask
    document_starts: torch.Tensor | None = None
    # [C, s / C] int64, under context parallelism: the positions that each of C ranks holds
    places: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device; to a GPU from pinned memory, without waiting."""
        to_gpu = torch.device(device).type == "cuda"
        moved = {
            name: (value.pin_memory() if to_gpu else value).to(device, non_blocking=to_gpu)
            for name, value in vars(self).items()
            if value is not None
        }
        return replace(self, **moved)


class Reader(Protocol):
    """Reads the s + 1 tokens of each sample."""

    def windows(self, sample: np.ndarray) -> np.ndarray:
        """[m] sample numbers -> [m, s + 1] int64 token ids."""


class PythonReader(Reader, Protocol):
    """Training samples of a program that calls the trainer."""

    identity: str  # changes with any sample: a resume refuses another one


@dataclass(frozen=True)
class Source:
    """Endless samples: `batch` is a pure function. `config`: length and masks of the samples."""

    reader: Reader
    config: DataConfig
    eod: int
    bytes_per_token: float | None = None  # of a file whose sidecar knows it
    weight: float = 1.0  # share of its split's blend, which the mean over the split's sources takes

    def valid_tokens(self, first_sample: int, count: int) -> int:
        """Number of tokens of these samples that the loss counts."""
        if not self.config.eod_mask_loss:
            return count * self.config.seq_length
        samples = np.arange(first_sample, first_sample + count, dtype=np.int64)
        windows = self.reader.windows(samples)
        return int(np.count_nonzero(windows[:, :-1] != self.eod))

    def batch(self, first_sample: int, count: int) -> Batch:
        """Samples first_sample .. first_sample + count - 1. Raises DataError for a token outside
        the vocabulary.
        """
        sample = np.arange(first_sample, first_sample + count, dtype=np.int64)
        windows = self.reader.windows(sample)
        tokens, labels = windows[:, :-1], windows[:, 1:]
        config = self.config
        positions = np.broadcast_to(np.arange(config.seq_length), tokens.shape)
        starts = np.zeros(tokens.shape, np.int64)
        if config.reset_position_ids or config.reset_attention_mask:
            # an end-of-document token belongs to its document; the next position begins one
            starts[:, 1:] = np.where(tokens[:, :-1] == self.eod, positions[:, 1:], 0)
            starts = np.maximum.accumulate(starts, axis=1)
        mask = tokens != self.eod if config.eod_mask_loss else np.ones(tokens.shape, np.float32)
        arrays = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": mask.astype(np.float32, copy=False),
            "position_ids": positions - starts if config.reset_position_ids else positions,
            "sample_ids": sample,
        }
        if config.reset_attention_mask:
            arrays["document_starts"] = starts.astype(np.int32)
        return Batch(
            **{name: torch.from_numpy(np.array(array, order="C")) for name, array in arrays.items()}
        )


@dataclass(frozen=True)
class FileReader:
    """Samples of one or several token streams, mixed by a blend."""

    streams: list[TokenStream]
    blend: Blend

    def windows(self, sample: np.ndarray) -> np.ndarray:
        out = np.empty((len(sample), self.streams[0].seq_length + 1), np.int64)
        source, index = self.blend.locate(sample)
        for d, stream in enumerate(self.streams):
            rows = np.flatnonzero(source == d)
            if len(rows):
                stream.read(index[rows], rows, out)
        return out


@dataclass(frozen=True)
class _ProgramReader:
    """A program's reader, continued by the data history; ids are compared with the vocabulary."""

    reader: PythonReader
    blend: Blend
    vocab_size: int

    def windows(self, sample: np.ndarray) -> np.ndarray:
        windows = self.reader.windows(self.blend.locate(sample)[1])
        foreign = windows[(windows < 0) | (windows >= self.vocab_size)]
        if len(foreign):
            raise DataError(
                f"{type(self.reader).__name__}: token id {foreign[0]} lies outside the vocabulary "
                f"of {self.vocab_size}: correct the reader, or set a larger vocab_size"
            )
        return windows


@dataclass(frozen=True)
class MockReader:
    """Computed tokens that a model can learn: documents of 100 tokens, each an arithmetic
    progression modulo the vocabulary without the end-of-document id, with a small step and a skewed
    first token; one token in twenty is random.
    """

    seq_length: int
    vocab_size: int
    eod: int
    key: np.uint64  # of the seed and the split

    def windows(self, sample: np.ndarray) -> np.ndarray:
        position = sample[:, None] * self.seq_length + np.arange(self.seq_length + 1)
        document, inside = np.divmod(position, MOCK_DOCUMENT)
        drawn = mix(self.key + mix(document.astype(np.uint64)))
        share = (drawn >> np.uint64(11)).astype(np.float64) / 2.0**53  # uniform in [0, 1)
        ordinary = max(self.vocab_size - 1, 1)
        first = (ordinary * share**3).astype(np.int64)
        step = 1 + (drawn % np.uint64(3)).astype(np.int64)
        noise = mix(mix(self.key) + position.astype(np.uint64))
        is_random = noise % np.uint64(20) == 0
        other = (noise >> np.uint64(20)).astype(np.int64)
        token = np.where(is_random, other, first + inside * step) % ordinary
        token += token >= self.eod  # skip the end-of-document id
        return np.where(inside == MOCK_DOCUMENT - 1, self.eod, token)


@dataclass(frozen=True)
class Data:
    """The data of a run. `valid` and `test` are named sources, `history` goes into the checkpoint,
    and `notes` are lines for the banner.
    """

    train: Source | None  # None when only evaluation was asked for
    valid: dict[str, Source]
    test: dict[str, Source]
    history: JsonObject
    notes: list[str]


@dataclass
class _Opener:
    """Opens each prefix once, makes streams and sources, and collects the faults of all."""

    config: Config
    tokenizer: Any
    datasets: dict[str, IndexedDataset] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def streams(self, split: str) -> list[TokenStream]:
        """The token streams of a split, with their weights."""
        data, cut_by = self.config.data, None
        if data.data_path:
            paths, cut_by = parse_blend(data.data_path, "--data-path"), data.split
            if parse_split(cut_by)[SPLITS.index(split)] == 0:
                return []
        else:
            own = getattr(data, f"{split}_data_path")
            paths = parse_blend(own or (), f"--{split}-data-path")
        found: dict[str, TokenStream] = {}  # by the data that they hold
        too_small = []
        for weight, prefix in paths:
            dataset = None if weight == 0 else self.open(prefix)
            if dataset is None:
                continue
            try:
                stream = self.stream(dataset, split, cut_by)
            except DataError as error:
                too_small.append(str(error))
                continue
            if weight is not None:
                stream.weight = weight
            first = found.setdefault(stream.identity, stream)
            if first is not stream:
                self.faults.append(
                    f"{prefix}: this data is given twice, first as {first.dataset.prefix}: "
                    "name it once, with the sum of the weights"
                )
        if cut_by and split != "train" and found:
            # other sources are evaluated; the message of a source that is too small has the fix
            self.notes += [f"{split}: left out: {problem}" for problem in too_small]
        else:
            self.faults += too_small
        return list(found.values())

    def stream(self, dataset: IndexedDataset, split: str, cut_by: str | None) -> TokenStream:
        """The part of a dataset for a split, by a --split or (None) all of it. Raises DataError
        where that is less than a sample.
        """
        count = dataset.num_sequences
        first, stop = split_range(parse_split(cut_by), split, count) if cut_by else (0, count)
        if first == stop:
            raise DataError(
                f"{dataset.prefix}: --split {cut_by} leaves no document of its {count} "
                f"for {split}: give {split} a larger share, "
                f"or 0 to do without it, or name separate files with --{split}-data-path"
            )
        seed = self.config.training.seed if split == "train" else EVALUATION_SEED
        seq_length = self.config.data.seq_length
        return TokenStream(dataset, first, stop, seq_length, seed, self.tokenizer.vocab_size)

    def open(self, prefix: str) -> IndexedDataset | None:
        """The dataset, checked against the tokenizer and the flags; None after a fault."""
        if prefix not in self.datasets:
            try:
                dataset = IndexedDataset(prefix)
                self._check_ids(dataset)
                self._check_tokenizer(dataset)
            except DataError as error:
                self.faults.append(str(error))
                return None
            self.datasets[prefix] = dataset
        return self.datasets[prefix]

    def _check_ids(self, dataset: IndexedDataset) -> None:
        """Compare the ids of the data with the vocabulary: all, or the ends without a sidecar."""
        prefix, vocab_size = dataset.prefix, self.tokenizer.vocab_size
        if self.config.data.check_data:
            dataset.check(vocab_size)
            self.notes.append(f"{prefix}: scanned in full, sound")
        elif not dataset.sidecar:
            dataset.check_ends(vocab_size)
            self.notes.append(
                f"{prefix}: has no sidecar, so ids are checked as they are read; --check-data "
                "scans the files before training"
            )

    def _check_tokenizer(self, dataset: IndexedDataset) -> None:
        """Compare the tokenizer that made the data with this run's, and the flags that need an
        end-of-document id with the data.
        """
        data, ours, sidecar = self.config.data, self.tokenizer, dataset.sidecar
        theirs = sidecar["tokenizer"] if sidecar else {}
        maker = f"{theirs.get('name')}, end of document {theirs.get('eod')}"
        if sidecar and sidecar["max_id"] >= ours.vocab_size:
            raise DataError(
                f"{dataset.bin_path}: its largest token id, {sidecar['max_id']}, lies "
                f"outside the vocabulary of {ours.vocab_size}: the data was made with {maker}; "
                "give that tokenizer, or preprocess the text again"
            )
        if sidecar and (theirs["fingerprint"], theirs["eod"]) != (ours.fingerprint, ours.eod):
            self.notes.append(
                f"{dataset.prefix}: made with another tokenizer ({maker}) than this run's "
                f"({ours.name}, end of document {ours.eod})"
            )
        names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        flags = ", ".join(flag_name(name) for name in names if getattr(data, name))
        is_counted = theirs.get("eod") == ours.eod
        if flags and not (sidecar["eod_count"] if is_counted else dataset.contains(ours.eod)):
            raise DataError(
                f"{dataset.bin_path}: holds no end-of-document id ({ours.eod}), so {flags} "
                "cannot act: preprocess with --append-eod and this tokenizer, or drop the flag"
            )

    def held_out(self, title: str, streams: list[TokenStream]) -> dict[str, Source]:
        """One source per stream: a single one is named `title`, several by the last part of their
        prefix (or all of it when those collide).
        """
        names = [stream.dataset.prefix for stream in streams]
        short = [each.rsplit("/", 1)[-1].removesuffix("_text_document") for each in names]
        if len(set(short)) == len(short):
            names = short if len(short) > 1 else [title]
        total = sum(stream.weight for stream in streams)
        return {
            name: Source(
                FileReader([stream], Blend([1])),
                self.config.data,
                self.tokenizer.eod,
                stream.dataset.bytes_per_token,
                stream.weight / total,
            )
            for name, stream in zip(names, streams)
        }


def split_range(shares: list[Fraction], split: str, sequences: int) -> tuple[int, int]:
    """First and stop sequence of one split: [round(lo N), round(hi N))."""
    k = SPLITS.index(split)
    return round(sum(shares[:k]) * sequences), round(sum(shares[: k + 1]) * sequences)


def build_data(
    config: Config,
    tokenizer: Any,
    history: JsonObject | None = None,
    consumed: int = 0,
    reader: PythonReader | None = None,
) -> Data:
    """Open, check and mix the data of a run that has `consumed` samples under the data `history`
    (None: a new run). `reader`: of training samples, in place of the computed ones of --mock-data.

    Validation and test are opened unless --eval-iters is 0. Raises one DataError with all faults.
    """
    evaluate = config.evaluation.eval_iters > 0
    if config.data.mock_data:
        data = _mock_data(config, tokenizer, evaluate)
        return data if reader is None else _read_by(data, reader, tokenizer, history, consumed)
    if reader is not None:
        raise DataError("a reader takes the place of computed data; set mock_data=True")

    # 1. All files; their faults are raised together.
    opener = _Opener(config, tokenizer)
    train = opener.streams("train")
    if not train and not opener.faults and not config.evaluation.skip_train:
        opener.faults.append(
            "no training data: give --data-path (with a share for train in --split), "
            "--train-data-path or --mock-data"
        )
    held_out = {split: opener.streams(split) if evaluate else [] for split in ("valid", "test")}
    if opener.faults:
        raise DataError("\n".join(dict.fromkeys(opener.faults)))

    # 2. The training blend, continued from the history of the run; held-out sources are not mixed.
    source = None
    if train:
        source, history = _blended(opener, train, history, consumed)
    for split, streams in held_out.items():
        if len(streams) > 1:
            opener.notes.append(
                f"{split}: each source is evaluated by itself; the loss of the blend is "
                "their mean by weight (without weights: by tokens)"
            )
        opener.notes += [_size(split, stream) for stream in streams]
    valid = opener.held_out("validation", held_out["valid"])
    test = opener.held_out("test", held_out["test"])
    return Data(source, valid, test, history or {"segments": []}, opener.notes)


def _blended(
    opener: _Opener, streams: list[TokenStream], history: JsonObject | None, consumed: int
) -> tuple[Source, JsonObject]:
    """The training samples and the continued data history."""
    # the same sources named in another order are the blend that the run was reading
    last = history["segments"][-1]["sources"] if history and history["segments"] else []
    ids = [source["id"] for source in last]
    if set(ids) == {stream.identity for stream in streams}:
        streams = sorted(streams, key=lambda stream: ids.index(stream.identity))
    names = [stream.dataset.prefix for stream in streams]
    shares = quotas([stream.weight for stream in streams], names)
    entries = [
        {"id": stream.identity, "content": stream.content, "name": name, "share": share}
        for stream, name, share in zip(streams, names, shares)
    ]
    history, blend, changes = extend_history(history, consumed, entries)
    for stream, share in zip(streams, shares):
        size = _size("train", stream)
        opener.notes.append(f"{size} an epoch, share {share}/{PATTERN} = {share / PATTERN:.6f}")
    opener.notes += changes
    reader, eod = FileReader(streams, blend), opener.tokenizer.eod
    return Source(reader, opener.config.data, eod), history


def _size(split: str, stream: TokenStream) -> str:
    prefix = stream.dataset.prefix
    return f"{split}: {prefix}: {stream.num_tokens:,} tokens, {stream.samples:,} samples"


def _mock_data(config: Config, tokenizer: Any, evaluate: bool) -> Data:
    vocab_size, eod = tokenizer.vocab_size, tokenizer.eod
    if vocab_size < 2:
        raise DataError(f"--mock-data needs a vocabulary of at least 2, got {vocab_size}")

    def source(name: str, seed: int) -> Source:
        key = key_of("mock", seed, name)
        reader = MockReader(config.data.seq_length, vocab_size, eod, key)
        return Source(reader, config.data, eod)

    train = source("train", config.training.seed)
    validation, test = (
        {name: source(name, EVALUATION_SEED)} if evaluate else {} for name in ("validation", "test")
    )
    notes = [f"mock data: computed tokens over the vocabulary of {vocab_size}"]
    return Data(train, validation, test, {"segments": []}, notes)


def _read_by(
    data: Data, reader: PythonReader, tokenizer: Any, history: JsonObject | None, consumed: int
) -> Data:
    """The data with the samples of a program for training; evaluation stays on computed tokens."""
    name = type(reader).__name__
    entry = {"id": reader.identity, "content": reader.identity, "name": name, "share": PATTERN}
    history, blend, changes = extend_history(history, consumed, [entry])
    evaluated = [f"evaluation on {note}" for note in data.notes if data.valid]
    notes = [f"train: {name}, a reader in Python ({reader.identity})", *evaluated, *changes]
    train = replace(data.train, reader=_ProgramReader(reader, blend, tokenizer.vocab_size))
    return replace(data, train=train, history=history, notes=notes)
