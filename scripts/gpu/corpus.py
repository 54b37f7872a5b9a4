"""Build a corpus of the Python sources of installed packages, so that no text has to be copied.

    python scripts/gpu/corpus.py FOLDER MEGABYTES VOCAB_SIZE

Writes FOLDER/text.jsonl, a file a line without copies, and FOLDER/tokenizer.json, a byte-level BPE
of VOCAB_SIZE entries learned from every tenth line. Prints what was read as a JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
MAX_FILE_BYTES = 1 << 20  # longer files are mostly tables


def sources(megabytes: int) -> Iterator[str]:
    """The text of different files, in the order of digests of their names, up to a size."""
    packages = Path(find_spec("torch").origin).parents[1]
    by_name = {str(path.relative_to(packages)): path for path in packages.rglob("*.py")}
    seen, left = set(), megabytes * 1_000_000
    for name in sorted(by_name, key=lambda name: sha256(name.encode()).digest()):
        if left <= 0:
            return
        if not by_name[name].is_file() or by_name[name].stat().st_size > MAX_FILE_BYTES:
            continue
        content = by_name[name].read_bytes()
        digest = sha256(content).digest()
        if content and digest not in seen:
            seen.add(digest)
            text = content.decode("utf-8", errors="replace")
            left -= len(text)
            yield text


def learn(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE whose first entry ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    megabytes = int(arguments[1])
    texts = list(sources(megabytes))
    found = sum(map(len, texts))
    if found < 500_000 * megabytes:
        print(f"{found} characters found; {megabytes} MB were asked for", file=sys.stderr)
        return 1
    with open(folder / "text.jsonl", "w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    learn(texts[::10], int(arguments[2])).save(str(folder / "tokenizer.json"))
    digest = sha256("".join(texts).encode()).hexdigest()
    print(json.dumps({"files": len(texts), "characters": found, "sha256": digest}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
