"""A simulated disk under the real recorder: what processes see, and what survives a power failure.

    os.mkdir, io.open, os.fsync, os.rename, shutil.rmtree ...  ->  an operation, one tuple  ->  Disk.apply

`Machine` runs the code of one process on the results of the operations that it has made so far, and
stops it at the next one. A process is therefore a function from its history to its next operation,
and a checker can continue it in any order with others, without threads.

A power failure keeps of a file what was fsynced, or also what was written; of a folder's changes
since its fsync any subset. This is less than any file system in use guarantees.
"""

import builtins
import errno
import io
import itertools
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = "/simulated"
FOLDER = "folder"  # in place of an inode
MAX_SUBSETS = 5  # changes of which every subset is tried; of more, prefixes and all but one


@dataclass(frozen=True)
class Disk:
    """Names to inodes, inodes to bytes, their fsynced state, and the changes since then."""

    names: dict[str, Any] = field(default_factory=lambda: {ROOT: FOLDER})
    data: dict[Any, bytes] = field(default_factory=dict)
    durable: dict[str, Any] = field(default_factory=lambda: {ROOT: FOLDER})
    synced: dict[Any, bytes] = field(default_factory=dict)
    pending: tuple[tuple[tuple[str, Any], ...], ...] = ()

    def key(self) -> Any:
        """A hashable value, equal for equal states."""
        reachable = {*self.names.values(), *self.durable.values()}
        reachable |= {inode for change in self.pending for _, inode in change}
        return (
            frozenset(self.names.items()),
            frozenset((i, d) for i, d in self.data.items() if i in reachable),
            frozenset(self.durable.items()),
            frozenset((i, d) for i, d in self.synced.items() if i in reachable),
            # changes of different folders commute
            frozenset((folder, tuple(changes)) for folder, changes in self.by_folder().items()),
        )

    def by_folder(self) -> dict[str, list[Any]]:
        """The changes since the last fsync of each folder."""
        folders: dict[str, list[Any]] = {}
        for change in self.pending:
            folders.setdefault(os.path.dirname(change[0][0]), []).append(change)
        return folders

    def apply(self, op: tuple[Any, ...], inode: Any) -> "tuple[Any, Disk]":
        """Return the result of an operation and the disk after it; `inode` is new.

        An error is the result ("error", number).
        """
        kind, path = op[0], op[1]
        parent = os.path.dirname(path) if isinstance(path, str) else ""
        here = self.names.get(path)
        if kind in ("write", "fsync_write"):  # of an open file, which may have no name any more
            data = {**self.data, path: op[2]}
            synced = {**self.synced, path: op[2]} if kind == "fsync_write" else self.synced
            return None, replace(self, data=data, synced=synced)
        if kind == "take":  # the kernel's lock, which `Explorer` has granted: the file names its holder
            inode = here or inode
            after = self if here else self.named((path, inode))
            return True, replace(after, data={**self.data, inode: op[2].encode()})
        if kind in ("mkdir", "create") and self.names.get(parent) != FOLDER:
            return ("error", errno.ENOENT), self
        if kind == "mkdir":
            return (("error", errno.EEXIST), self) if here else (None, self.named((path, FOLDER)))
        if kind == "create":
            if here is not None:
                return here, replace(self, data={**self.data, here: b""})
            return inode, replace(self.named((path, inode)), data={**self.data, inode: b""})
        if here is None:
            return ("error", errno.ENOENT), self
        below = [name for name in self.names if os.path.dirname(name) == path]
        if kind == "stat":
            return (FOLDER if here == FOLDER else len(self.data[here])), self
        if kind == "scan":
            return tuple(sorted((os.path.basename(n), self.names[n] == FOLDER) for n in below)), self
        if kind == "read":
            return (("error", errno.EISDIR) if here == FOLDER else self.data[here]), self
        if kind == "rmdir":
            return (("error", errno.ENOTEMPTY), self) if below else (None, self.named((path, None)))
        if kind == "unlink":
            return None, self.named((path, None))
        if kind == "rename":
            return None, self.named((path, None), (op[2], here))
        assert kind == "fsync", op
        if here != FOLDER:
            return None, replace(self, synced={**self.synced, here: self.data[here]})
        of_folder = [c for c in self.pending if os.path.dirname(c[0][0]) == path]
        rest = tuple(c for c in self.pending if os.path.dirname(c[0][0]) != path)
        return None, replace(self, durable=changed(self.durable, of_folder), pending=rest)

    def named(self, *change: tuple[str, Any]) -> "Disk":
        """Return the disk after an atomic change of names."""
        return replace(self, names=changed(self.names, [change]), pending=(*self.pending, change))

    def after_crashes(self) -> "Iterator[Disk]":
        """Yield what a power failure may leave."""
        for kept in subsets(self.pending):
            names = reachable(changed(self.durable, kept))
            inodes = set(names.values()) - {FOLDER}
            old = {inode: self.synced.get(inode, b"") for inode in inodes}
            new = {inode: self.data[inode] for inode in inodes}
            for data in [old] if old == new else [old, new]:
                yield Disk(names, data, names, data)


def changed(names: dict[str, Any], changes: Any) -> dict[str, Any]:
    """Return the names after changes; an inode of None removes."""
    result = dict(names)
    for change in changes:
        for path, inode in change:
            if inode is None:
                result.pop(path, None)
            else:
                result[path] = inode
    return result


def reachable(names: dict[str, Any]) -> dict[str, Any]:
    """Return the names whose folders exist."""
    kept: dict[str, Any] = {}
    for path in sorted(names, key=len):
        if path == ROOT or kept.get(os.path.dirname(path)) == FOLDER:
            kept[path] = names[path]
    return kept


def subsets(changes: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield subsets in order: all of a few, of many the prefixes and all but one."""
    if len(changes) <= MAX_SUBSETS:
        for size in range(len(changes) + 1):
            yield from itertools.combinations(changes, size)
        return
    yield from (changes[:size] for size in range(len(changes) + 1))
    yield from (changes[:i] + changes[i + 1 :] for i in range(len(changes)))


class Pause(BaseException):
    """The process has reached an operation whose result it does not have yet."""


class Machine:
    """Runs real code against a simulated disk: on a history, or directly on a disk."""

    def __init__(self) -> None:
        self.history: list[Any] = []
        self.position = 0
        self.op: tuple[Any, ...] | None = None
        self.direct: Disk | None = None
        self.descriptors: dict[int, Any] = {}
        self.inodes = itertools.count()
        self.last_path = ""

    def next_op(self, body: Callable[[], Any], history: list[Any]) -> tuple[Any, ...]:
        """Return the operation after a history, or ("done", outcome)."""
        self.history, self.position, self.op, self.direct = history, 0, None, None
        try:
            outcome = body()
        except Pause:
            pass
        except (ValueError, OSError) as error:
            outcome = f"{type(error).__name__}: {error}"
        if self.op is None:
            return ("done", outcome)
        return self.op

    def on(self, disk: Disk, body: Callable[[], Any]) -> tuple[Any, Disk]:
        """Run a body to its end; return its result and the disk."""
        self.op, self.direct = None, disk
        try:
            return body(), self.direct
        finally:
            self.direct = None

    def call(self, *op: Any) -> Any:
        """Perform an operation of the running process."""
        if op[0] == "stat":
            self.last_path = op[1]
        if self.direct is not None and op[0] in ("mark", "await"):
            return None
        if self.direct is not None:
            result, self.direct = self.direct.apply(op, ("setup", next(self.inodes)))
        elif self.op is not None or self.position == len(self.history):
            self.op = self.op or op  # operations of `finally` do not happen in a stopped process
            raise Pause
        else:
            result = self.history[self.position]
            self.position += 1
        if isinstance(result, tuple) and result[:1] == ("error",):
            raise OSError(result[1], os.strerror(result[1]), str(op[1]))
        return result

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Send operations below ROOT to this machine."""
        with ExitStack() as stack:
            for module, name, simulated in self.functions():
                real = getattr(module, name)

                def chosen(first: Any, *rest: Any, r: Any = real, s: Any = simulated, **more: Any) -> Any:
                    ours = first in self.descriptors if isinstance(first, int) else is_ours(first)
                    return s(first, *rest, **more) if ours else r(first, *rest, **more)

                stack.enter_context(mock.patch.object(module, name, chosen))
            yield

    def functions(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        def simple(kind: str) -> Callable[..., Any]:
            return lambda path, *rest, **more: self.call(kind, os.fspath(path), *map(os.fspath, rest[:1]))

        def status(path: Any, **more: Any) -> Any:
            size = self.call("stat", os.fspath(path))
            mode = stat.S_IFDIR if size == FOLDER else stat.S_IFREG
            return SimpleNamespace(st_mode=mode, st_size=size, st_mtime=0.0)

        def rmtree(path: Any, ignore_errors: bool = False) -> None:
            for name, is_folder in self.call("scan", os.fspath(path)):
                if is_folder:
                    rmtree(f"{path}/{name}")
                else:
                    self.call("unlink", f"{path}/{name}")
            self.call("rmdir", os.fspath(path))

        return [
            *((os, name, simple(name)) for name in ("unlink", "rmdir", "rename")),
            (os, "mkdir", lambda path, *mode: self.call("mkdir", os.fspath(path))),
            (os, "listdir", lambda path: [name for name, _ in self.call("scan", os.fspath(path))]),
            (os, "stat", status),
            (os, "open", lambda path, *flags: self.descriptor(os.fspath(path))),
            (os, "fsync", lambda number: self.fsync(self.descriptors[number])),
            (os, "close", lambda number: self.descriptors.pop(number)),
            (io, "open", self.open),
            (builtins, "open", self.open),
            (shutil, "rmtree", rmtree),
            (shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 50)),
        ]

    def descriptor(self, what: Any) -> int:
        """Return a number for an open file or a path."""
        number = 1 << 20 | len(self.descriptors)
        self.descriptors[number] = what
        return number

    def open(self, path: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if mode == "rb":
            return io.BytesIO(self.call("read", os.fspath(path)))
        return SimulatedFile(self, self.call("create", os.fspath(path)))

    def fsync(self, what: Any) -> None:
        """Fsync a path, or an open file with what was written to it."""
        if isinstance(what, SimulatedFile):
            self.call("fsync_write", what.inode, bytes(what.written))
            what.is_clean = True
        else:
            self.call("fsync", what)


class SimulatedFile:
    """A file that is being written: all of it in one operation, when it is fsynced or closed."""

    def __init__(self, machine: Machine, inode: Any) -> None:
        self.machine, self.inode, self.written, self.is_clean = machine, inode, bytearray(), True

    def write(self, data: Any) -> int:
        self.written += data
        self.is_clean = False
        return len(data)

    def flush(self) -> None:
        """Nothing: a write is an operation of its own when it is fsynced."""

    def fileno(self) -> int:
        return self.machine.descriptor(self)

    def __enter__(self) -> "SimulatedFile":
        return self

    def __exit__(self, *error: object) -> None:
        if not self.is_clean:
            self.machine.call("write", self.inode, bytes(self.written))


def is_ours(path: Any) -> bool:
    return os.fspath(path).startswith(ROOT) if isinstance(path, str | os.PathLike) else False
