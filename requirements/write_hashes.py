"""Write the hashes of requirements/pinned.txt anew.

    python requirements/write_hashes.py

After each `name==version` come the SHA-256 digests of all wheels of that version that CPython 3.11,
3.12 or 3.13 installs on Linux with glibc, x86_64 or aarch64, as pip's own indexes list them.
Packages of BY_VERSION keep their version alone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from packaging.tags import Tag
from packaging.utils import canonicalize_name, parse_wheel_filename
from pip._internal.commands import create_command
from pip._internal.index.collector import parse_links
from pip._internal.models.link import Link

PINS = Path(__file__).with_name("pinned.txt")
BY_VERSION = {"torch"}  # its builds (CPU, each CUDA, a site's own) are other files of one version
PYTHONS = ("cp311", "cp312", "cp313")
MACHINES = ("x86_64", "aarch64")


def installable(tag: Tag) -> bool:
    """Whether a wheel with this tag suits one of our interpreters and machines."""
    platform = tag.platform == "any" or (
        tag.platform.startswith(("manylinux", "linux")) and tag.platform.endswith(MACHINES)
    )
    stable = tag.abi == "abi3" and re.fullmatch(r"cp3\d?|cp31[0-3]", tag.interpreter)
    python = tag.interpreter in ("py3", "py311", "py312", "py313") or stable
    return platform and bool(
        python or (tag.interpreter in PYTHONS and tag.abi in (*PYTHONS, "none"))
    )


class Indexes:
    """The indexes that pip is configured with on this machine."""

    def __init__(self) -> None:
        command = create_command("download")
        options, _ = command.parse_args(["-"])
        with command.main_context():
            session = command.get_default_session(options)
            self.collector = command._build_package_finder(options, session)._link_collector

    def links(self, name: str) -> list[Link]:
        """Every file of a package."""
        sources = self.collector.collect_sources(name, candidates_from_page=lambda _: [])
        links = [source.link for source in sources.index_urls if source is not None]
        pages = [self.collector.fetch_response(link) for link in links]
        return [link for page in pages if page is not None for link in parse_links(page)]

    def hashes(self, name: str, version: str) -> list[str]:
        """Sorted digests of the wheels of this version that `installable` takes."""
        found = set()
        for link in self.links(name):
            if f"-{version}-" not in link.filename or link.hash_name != "sha256":
                continue  # names of long ago are no longer valid
            of, its, _, tags = parse_wheel_filename(link.filename)
            if of == name and str(its) == version and any(map(installable, tags)):
                found.add(link.hash)
        if not found:
            sys.exit(f"{name}=={version}: pip's indexes list no wheel of it that Linux installs")
        return sorted(found)


def main() -> None:
    indexes, lines = Indexes(), []
    for line in PINS.read_text().splitlines():
        if line.startswith("    --hash="):
            continue
        name, _, version = line.removesuffix(" \\").partition("==")
        if line.startswith("#") or name in BY_VERSION:
            lines.append(line)
            continue
        hashes = indexes.hashes(canonicalize_name(name), version)
        print(f"{name}=={version}: {len(hashes)}", flush=True)
        lines.append(
            " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{each}" for each in hashes)])
        )
    PINS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
