"""Identity of the code that a process runs, in its repository and outside of it.

    commit + uncommitted files     the trainer, in its repository
    script + local files           the user's: what the main script is, imports and names
    changed library files          installed from a wheel, and no longer what the wheel had

Files are named and digested, never copied.
"""

import hashlib
import os
import re
import site
import subprocess
import sys
import sysconfig
from base64 import urlsafe_b64decode
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from areal_core.safety.secrets import masker

OURS = ("areal_core", "areal_debug", "consistency", "hangdoctor", "recorder", "replayer")
PACKAGES = Path(__file__).parents[2]  # the folder of ours
# libraries whose code computes numbers of a run, by the names of their wheels
LIBRARIES = (
    "areal-debug",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "accelerate",
    "peft",
    "flash-attn",
    "triton",
    "sglang",
    "vllm",
    "trl",
    "verl",
    "datasets",
    "liger-kernel",
    "math-verify",
)
MOST_FILES = 500  # of the user, or uncommitted
# in a text: a file's name, an import, or "module:function" and "module.function"
NAMES = re.compile(r"""(\w+)\.py\b|\b(?:import|from)\s+(\w+)|["'](\w+)[:.]\w""")
SLACK_S = 2.0  # between the files of a wheel and its RECORD, which is written last


def code_identity(folder: Path) -> dict[str, Any]:
    """Return the identity of the code (FORMAT.md, `environment.code`) of this process.

    Args:
        folder: in the trainer's repository. Outside of any, as in an installed wheel, `commit`,
            `dirty_sha256` and `dirty_files` are None.
    """
    script = main_script()
    return {
        **repository_identity(folder),
        "script": None if script is None else {"path": masker().text(str(script)), "sha256": digest(script)},
        "local_files": digests(local_files(script), script.parent if script else Path("/")),
        "changed_libraries": changed_libraries(LIBRARIES),
    }


def repository_identity(folder: Path) -> dict[str, Any]:
    """Return the commit of a folder, and digests of what is not committed, as a whole and by file.

    A file that was deleted has None in place of a sha256.
    """
    found = git(folder, "rev-parse", "HEAD", "--show-toplevel")
    if found is None:
        return {"commit": None, "dirty_sha256": None, "dirty_files": None}
    commit, top = os.fsdecode(found).splitlines()
    changed = git(folder, "diff", "HEAD", "--binary") or b""
    names = (git(folder, "diff", "HEAD", "--name-only", "-z") or b"").split(b"\0") if changed else []
    new_files = (git(folder, "ls-files", "--others", "--exclude-standard", "-z", "*.py") or b"").split(b"\0")
    for name in sorted(filter(None, new_files)):
        changed += name + (folder / os.fsdecode(name)).read_bytes()
    paths = [Path(top, os.fsdecode(name)) for name in names if name]
    paths += [folder / os.fsdecode(name) for name in new_files if name]
    return {
        "commit": commit,
        "dirty_sha256": hashlib.sha256(changed).hexdigest() if changed else None,
        "dirty_files": digests(paths, Path(top)),
    }


def git(folder: Path, *arguments: str) -> bytes | None:
    """Return the output of a git command, or None if git or the repository is absent."""
    try:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def digest(path: Path) -> str | None:
    """Return the sha256 of a file, None for one that cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    except OSError:
        return None


def source_of(path: Path) -> str:
    """Return the text of a file; "" for one that cannot be read, as a module in a zip file."""
    try:
        return path.read_text(errors="replace") if path.is_file() else ""
    except OSError:
        return ""


def main_script() -> Path | None:
    """Return the user's script that this process runs; None for a command of ours or a library.

    None for a program that is no file, too: one from standard input is called `<stdin>`.
    """
    file = vars(sys.modules["__main__"]).get("__file__")
    if file is None:
        return None
    path = Path(os.path.abspath(file))
    is_foreign = not str(path).startswith(installed_folders()) and not is_ours(path)
    return path if path.is_file() and is_foreign else None


def is_ours(path: Path) -> bool:
    """Return whether a file is one of our packages, whose identity is the commit or the version."""
    return path.is_relative_to(PACKAGES) and path.relative_to(PACKAGES).parts[0] in OURS


def installed_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    folders = [*map(sysconfig.get_path, names), *site.getsitepackages(), site.getusersitepackages()]
    # where a link leads, too: a virtual environment may be one
    return tuple({f"{path}{os.sep}" for folder in folders for path in (folder, os.path.realpath(folder))})


def local_files(script: Path | None) -> set[Path]:
    """Return the user's Python files: those imported, and those beside the script that it names.

    A reward function is imported by another process; its file's name is in the script.
    """
    installed = installed_folders()
    libraries = {name.replace("-", "_") for name in LIBRARIES}
    files = {
        Path(file)
        for module, file in module_files()
        if not file.startswith(installed) and module.partition(".")[0] not in libraries
    }
    found = {file for file in files if not is_ours(file)} | set(files_named(script))
    return found - ({script} if script else set())


def module_files() -> Iterator[tuple[str, str]]:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and file.endswith(".py"):
            yield name, file if file[0] == os.sep else os.path.abspath(file)


def files_named(script: Path | None) -> Iterator[Path]:
    if script is None:
        return
    beside = {file.stem: file for file in script.parent.glob("*.py") if file != script}
    waiting = [script]
    while waiting:
        text = source_of(waiting.pop())
        for stem in {name for names in NAMES.findall(text) for name in names} & beside.keys():
            waiting.append(beside.pop(stem))
            yield waiting[-1]


def user_files(script: Path | None) -> list[Path]:
    return [*([script] if script else []), *sorted(local_files(script))[:MOST_FILES]]


def digests(files: Iterable[Path], folder: Path) -> dict[str, str | None]:
    hide = masker()
    return {
        hide.text(str(file.relative_to(folder) if file.is_relative_to(folder) else file)): digest(file)
        for file in sorted(files)[:MOST_FILES]
    }


def changed_libraries(names: Iterable[str]) -> dict[str, dict[str, str | None] | None]:
    """Return the imported files of each library that differ from those of its installed wheel.

    Also of one that a folder on PYTHONPATH has in place of the installed one. None for a library
    that was not installed from a wheel: nothing is known of its files.
    """
    packages = {name.replace("-", "_"): name for name in names}
    imported: dict[str, list[str]] = {}
    for module, file in module_files():
        package = module.partition(".")[0]
        package = "areal_debug" if package in OURS else package  # the name of our wheel
        if package in packages:
            imported.setdefault(package, []).append(file)
    site_folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found = {}
    for package, files in sorted(imported.items()):
        folder = os.path.dirname(os.path.dirname(min(files, key=len)))  # above PACKAGE/__init__.py
        names = [file[len(folder) + 1 :] for file in files if file.startswith(f"{folder}{os.sep}")]
        record = wheel_record(package, [folder, *site_folders])
        found[packages[package]] = None if record is None else changed_files(Path(folder), record, names)
    return found


def wheel_record(package: str, folders: Iterable[str]) -> Path | None:
    for folder in folders:
        if found := next(Path(folder).glob(f"{package}-*.dist-info/RECORD"), None):
            return found
    return None


def changed_files(folder: Path, record: Path, names: Iterable[str]) -> dict[str, str | None]:
    """Return name and sha256 of the files below a folder that are not those of a RECORD.

    A file is read only if its size is not the recorded one, or if it was modified after the
    installation: of thousands, in milliseconds.
    """
    entries = dict(
        line.split(",sha256=", 1) for line in record.read_text().split("\n") if ".py,sha256=" in line
    )
    installed = record.stat().st_mtime
    found = {}
    for name in names:
        if name not in entries:
            continue
        encoded, _, size = entries[name].partition(",")
        facts = os.stat(folder / name)
        if facts.st_size != int(size) or facts.st_mtime > installed + SLACK_S:
            current = digest(folder / name)
            if current != urlsafe_b64decode(f"{encoded}==").hex():
                found[name] = current
    return found
