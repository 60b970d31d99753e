"""Files of other frameworks, mutated; pickles, and what an unpickler returns."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from recorder import open_record
from recorder.errors import RecordError
from recorder.trainers.importing import FORMATS, import_record, write_import
from recorder.trainers.stand_ins import Instance
from recorder.trainers.unpickle import load_bytes

from ..importers import dataproto, eras, lines, pickled
from .fuzz_records import read_everything
from .inputs import Case, Files, pickle_edit
from .targets import Target, read_folder

WRITERS = {
    "slime": pickled.write_slime,
    "miles": pickled.write_miles,
    "skyrl": pickled.write_skyrl,
    "skyrl before 0.4": eras.write_old_skyrl,
    "xtuner": pickled.write_xtuner,
    "areal": pickled.write_areal_padded,
    "areal list": pickled.write_areal_list,
    "areal tensordict": pickled.write_areal_tensordict,
    "areal older tensordict": pickled.write_areal_older_tensordict,
    "verl": dataproto.write_verl,
    "verl queue": eras.write_verl_queue,
    "roll rlvr": dataproto.write_roll_rlvr,
    "roll agentic": dataproto.write_roll_agentic,
    "prime-rl": lines.write_prime_rl,
    "prime-rl export": lines.write_prime_rl_export,
    "prime-rl orchestrator": lambda folder: eras.write_orchestrator(folder, "0.6"),
    "nemo-rl": lines.write_nemo_rl,
    "nemo-rl before 0.6": eras.write_old_nemo_rl,
    "areno": lines.write_areno,
    "roll-text": lines.write_roll_text,
    "open-instruct": lines.write_open_instruct,
    "areal-text": lines.write_areal_text,
    "verl-text": lines.write_verl_text,
}
WITHOUT_PICKLE = (
    *("prime-rl", "prime-rl export", "prime-rl orchestrator", "nemo-rl", "nemo-rl before 0.6"),
    *("open-instruct", "areno", "areal-text", "verl-text", "roll-text"),
)
PICKLED = [name for name in WRITERS if name not in WITHOUT_PICKLE]
FORMAT, TREE = "format", "tree.json"


def format_of(base: str) -> bytes:
    name = base.split(" ")[0]
    return b"slime" if name == "miles" else name.encode()


def written(folder: Path, base: str) -> Files:
    place = folder / base
    place.mkdir(parents=True)
    source = WRITERS[base](place)
    return read_folder(source if source.is_dir() else source.parent)


def import_bases(folder: Path) -> dict[str, Files]:
    """Files without pickles, and one with: a pickle costs a process, and has two targets below."""
    found = {base: {FORMAT: format_of(base)} | written(folder, base) for base in WITHOUT_PICKLE}
    return found | {"slime": {FORMAT: b"slime"} | written(folder, "slime")}


def run_import(case: Case, box: Path) -> None:
    name = case.files.pop(FORMAT, b"").decode("latin-1")
    source = case.write(box / "source")
    import_record(source, box / "record", name)
    read_everything(open_record(box / "record"))


# Pickles, in this process: what the restricted child does


def pickle_bases(folder: Path) -> dict[str, Files]:
    found = {}
    for base in PICKLED:
        for name, data in written(folder, base).items():
            if name.endswith((".pt", ".pkl", ".dp")):
                found[f"{base} {name}"] = {"data": data}
    return found


def run_pickle(case: Case, box: Path) -> None:
    """In this process; in the child of an import, MemoryError becomes one sentence."""
    with contextlib.suppress(MemoryError):
        load_bytes(case.files["data"], "the input")


# What a pickle may hold, to the parsers of each format


def tree_bases(folder: Path) -> dict[str, Files]:
    found = {}
    for base in PICKLED:
        files = written(folder, base)
        pickles = [name for name in sorted(files) if name.endswith((".pt", ".pkl", ".dp"))]
        name = next(name for name in pickles if "eval" not in name)
        tree = json.dumps(encoded(load_bytes(files[name], name))).encode()
        found[base] = {FORMAT: format_of(base), TREE: tree, name: b"a pickle"}
    return found


def encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"@array": [value.dtype.str, list(value.shape), value.ravel().tolist()]}
    if isinstance(value, bytes):
        return {"@bytes": value.decode("latin-1")}
    if isinstance(value, Instance):
        return {"@object": [value.name, [encoded(one) for one in value.arguments], encoded(value.state)]}
    if isinstance(value, dict):
        return {str(key): encoded(one) for key, one in value.items()}
    return [encoded(one) for one in value] if isinstance(value, list) else value


def decoded(value: Any) -> Any:
    """Invert `encoded`. Raises ValueError and TypeError for an array that NumPy cannot hold."""
    match value:
        case {"@array": [dtype, shape, numbers]}:
            return np.array([decoded(one) for one in numbers], dtype).reshape(shape)
        case {"@bytes": str(text)}:
            return text.encode("latin-1", "replace")
        case {"@object": [name, [*arguments], state]}:
            return Instance(name, tuple(decoded(one) for one in arguments), decoded(state))
        case dict():
            return {key: decoded(one) for key, one in value.items()}
        case list():
            return [decoded(one) for one in value]
    return value


def run_tree(case: Case, box: Path) -> None:
    files = case.files
    name, tree = files.pop(FORMAT).decode("latin-1"), files.pop(TREE)
    try:
        document = decoded(json.loads(tree))
    except (ValueError, TypeError, RecursionError, OverflowError, SyntaxError):  # the last: a dtype
        return
    for importer in {sys.modules[known.read.__module__] for known in FORMATS.values()}:
        if hasattr(importer, "load_pickle"):
            importer.load_pickle = lambda path: document  # type: ignore[attr-defined]
        if hasattr(importer, "first_strings"):
            importer.first_strings = lambda path: names_in(document)  # type: ignore[attr-defined]
    source = case.write(box / "source")
    (box / "record").mkdir()
    write_import(source, box / "record", name, {}, {"path": "", "files": {}})
    read_everything(open_record(box / "record"))


def names_in(document: Any) -> set[str]:
    """Return what `first_strings` finds in a document."""
    first = document[0] if isinstance(document, list) and document else document
    return {key for key in first if isinstance(key, str)} if isinstance(first, dict) else set()


TARGETS = {
    "importers": Target(
        import_bases,
        run_import,
        (ValueError,),
        lambda chance: ["file", FORMAT, format_of(chance.choice(list(WRITERS))).decode()],
    ),
    "pickles": Target(pickle_bases, run_pickle, (RecordError,), pickle_edit),
    "trees": Target(tree_bases, run_tree, (RecordError,)),
}
