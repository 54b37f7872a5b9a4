"""Text of the machine itself, so that none has to travel: Python sources of installed packages.

    python scripts/gpu/corpus.py FOLDER MEGABYTES WORDS

Writes FOLDER/text.jsonl, a file a line without copies, and FOLDER/tokenizer.json, a byte-level BPE
of WORDS entries learned from every tenth line. Prints what it took as a JSON object.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
MOST = 1 << 20  # bytes of a file: longer ones are tables


def sources(megabytes: int) -> Iterator[str]:
    """The text of different files, in an order that is theirs alone, until so much is reached."""
    root = Path(sysconfig.get_paths()["purelib"])
    by_digest = {}
    for path in sorted(root.rglob("*.py")):
        if 0 < path.stat().st_size <= MOST:
            content = path.read_bytes()
            by_digest[hashlib.sha256(content).hexdigest()] = content
    left = megabytes * 1_000_000
    for digest in sorted(by_digest):
        if left <= 0:
            return
        text = by_digest[digest].decode("utf-8", errors="replace")
        left -= len(text)
        yield text


def learn(texts: list[str], words: int) -> Tokenizer:
    """A byte-level BPE whose last entry ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=words, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main(words: list[str]) -> int:
    folder = Path(words[0])
    folder.mkdir(parents=True, exist_ok=True)
    texts = list(sources(int(words[1])))
    with open(folder / "text.jsonl", "w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    learn(texts[::10], int(words[2])).save(str(folder / "tokenizer.json"))
    digest = hashlib.sha256("".join(texts).encode()).hexdigest()
    print(json.dumps({"files": len(texts), "characters": sum(map(len, texts)), "sha256": digest}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
