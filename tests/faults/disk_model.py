"""A model of page cache and disk, for what a kill or a power loss leaves: what the disk may hold
when only fsync makes things durable.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from threading import Lock

CALLS = ("open", "pwrite", "fsync", "rename", "mkdir", "close")
PATHS = ("open", "rename", "mkdir")  # calls that name a path, not a descriptor
REMOVALS = ("unlink", "rmdir")
# which names and which contents are there afterwards
CRASHES = {
    "kill": ("now", "now"),  # the page cache survives
    "power loss, names are on the disk at once": ("now", "durable"),
    "power loss, names are on the disk when their folder is synced": ("durable", "durable"),
}


class Node:
    """A file's bytes or a folder's entries, as programs see them and as the disk has them."""

    def __init__(self, empty: bytes | dict) -> None:
        self.now, self.durable = empty, empty


class Disk:
    """What a crash would leave of the files below `root`, by the system calls that write them.

    Before each call `crashes` receives it, as nested dictionaries of bytes, for each of CRASHES,
    where it has changed. File systems lie between the two kinds of power loss.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, Node({})
        self.files: dict = {}
        self.crashes: list[tuple[int, dict]] = []
        self.last: dict[str, tuple[int, dict]] = {}  # of each kind
        self.acknowledged = 0
        self.lock = Lock()

    def follow(self, monkeypatch) -> None:
        """The calls of this process, which are carried out too."""
        monkeypatch.setattr(shutil, "_use_fd_functions", False)  # rmtree names whole paths
        for name in (*CALLS, *REMOVALS):
            monkeypatch.setattr(os, name, self._followed(name, getattr(os, name)))

    def _followed(self, name: str, real):
        def call(*args, **kwargs):
            with self.lock:  # several threads may write
                self.crash()
                result = real(*args, **kwargs)
                getattr(self, f"on_{name}")(result, *args)
                return result

        return call

    def replay(self, events: list[tuple[int, str, object, tuple]]) -> None:
        """Calls of several processes that were recorded: (process, name, result, arguments), or
        (process, "acknowledge", iteration, ()).
        """
        for process, name, result, args in events:
            handler = getattr(self, f"on_{name}", None)
            if name == "acknowledge":
                self.acknowledged = result
            elif name in PATHS and self.root in (Path(args[0]), *Path(args[0]).parents):
                self.crash()
                handler((process, result), *args)
            elif name not in PATHS and (process, args[0]) in self.files:
                self.crash()
                handler(result, (process, args[0]), *args[1:])
        self.crash()

    def crash(self) -> None:
        def left(node: Node, names: str, contents: str) -> dict | bytes:
            if isinstance(node.now, bytes):
                return getattr(node, contents)
            children = getattr(node, names).items()
            return {name: left(child, names, contents) for name, child in children}

        for kind, views in CRASHES.items():
            state = self.acknowledged, left(self.top, *views)
            if state != self.last.get(kind):  # many calls change nothing of the rest
                self.crashes.append(state)
            self.last[kind] = state

    def entry(self, path) -> tuple[Node, str]:
        *folders, last = Path(path).relative_to(self.root).parts
        node = self.top
        for name in folders:
            node = node.now[name]
        return node, last

    def on_mkdir(self, _, path, mode=0o777):
        folder, name = self.entry(path)
        folder.now = folder.now | {name: Node({})}

    def on_open(self, file, path, flags, mode=0o777):
        if Path(path) == self.root:
            self.files[file] = self.top
            return
        folder, name = self.entry(path)
        if flags & os.O_CREAT:
            folder.now = folder.now | {name: Node(b"")}
        self.files[file] = folder.now[name]

    def on_rename(self, _, source, target):
        (a, old), (b, new) = self.entry(source), self.entry(target)
        node = a.now[old]
        a.now = {name: child for name, child in a.now.items() if name != old}
        b.now = b.now | {new: node}

    def on_unlink(self, _, path):
        folder, name = self.entry(path)
        folder.now = {other: child for other, child in folder.now.items() if other != name}

    on_rmdir = on_unlink

    def on_pwrite(self, count, file, data, at):
        data, node = bytes(data)[:count], self.files[file]
        node.now = node.now[:at].ljust(at, b"\0") + data + node.now[at + count :]

    def on_fsync(self, _, file):
        self.files[file].durable = self.files[file].now

    def on_close(self, _, file):
        self.files.pop(file, None)


def put(tree: dict, path: Path) -> Path:
    path.mkdir()
    for name, content in tree.items():
        if isinstance(content, dict):
            put(content, path / name)
        else:
            (path / name).write_bytes(content)
    return path
