"""A cut record has one step, and an anchor that also has the models: nothing else is needed.

    anchors/000003/cut.json       what was cut from which record, and its original numbers
                   checkpoint/    optimizer, schedule, RNG states; weights that are in no model folder
                   models/actor/  a model in Hugging Face format; models/ref, models/teacher, models/critic

In the config of such a record the paths of models are `models/actor` and so on. Its models may come
from anybody: they hold no code, no pickle, and no reference to files elsewhere. Imports no torch.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from areal_core.config import PPOConfig
from recorder import Record
from recorder.documents import Count, HexFloat, Step, parse_as, parse_document
from recorder.format import ANCHOR_FILE, ANCHORS_FOLDER, AnchorManifest, parse_anchor, step_name
from recorder.reader import checked_file, read_checksummed
from replayer.errors import WrongModel

CUT_FILE, MODELS = "cut.json", "models"
ALLOWED = (".safetensors", ".json", ".jinja", ".model", ".txt")
# files that name code or further files to load, and their members that do
REFERENCES = {
    "adapter_config.json": None,
    "config.json": "auto_map",
    "tokenizer_config.json": "auto_map",
    "generation_config.json": "custom_generate",
}


@dataclass(frozen=True)
class Cut:
    """cut.json: what a record was cut from.

    Attributes:
        source: the name of that record, without its folder. num_rows, num_tokens: of its step.
        kept: the rows that are left, as `PROMPT.SAMPLE`; None for the whole step.
        symptom: the expression of `--shrink`. numbers: its loss and gradient norm in the record.
        keeps_advantages: rewards are the advantages of the record's step, and nothing normalises
            them; only in files of 0.4 and before.
        error: how the step ends, if it ends with an error; then there is no outcome.
    """

    source: str
    step: Step
    num_rows: Count
    num_tokens: Count
    kept: tuple[str, ...] | None
    symptom: str | None
    numbers: dict[str, HexFloat]
    keeps_advantages: bool
    error: str | None


def read_cut(record: Record) -> Cut | None:
    """Return what a record was cut from; None if it was not. Raises DamagedRecord."""
    manifest = cut_manifest(record)
    if manifest is None:
        return None
    file = f"{ANCHORS_FOLDER}/{step_name(manifest.step)}/{CUT_FILE}"
    data = checked_file(record.storage, file, manifest.files[CUT_FILE])
    return parse_as(Cut, parse_document(data, file), file)


def cut_manifest(record: Record) -> AnchorManifest | None:
    anchors = record.anchors()
    if len(record.steps) != 1 or anchors != record.steps:
        return None
    file = f"{ANCHORS_FOLDER}/{step_name(anchors[0])}/{ANCHOR_FILE}"
    manifest = parse_anchor(read_checksummed(record.storage, file), file)
    return manifest if CUT_FILE in manifest.files else None


def use_carried_models(config: PPOConfig, record: Record) -> None:
    """Change the paths of models that the record carries to their folders on this machine.

    Raises:
        WrongModel: a model has a file that no model needs.
        DamagedRecord: a file is damaged.
    """
    if not is_carried(config.actor.path) or (manifest := cut_manifest(record)) is None:
        return
    folder = f"{ANCHORS_FOLDER}/{step_name(manifest.step)}"
    for name, entry in manifest.files.items():
        if name.startswith(f"{MODELS}/"):
            refuse_code(name, lambda: checked_file(record.storage, f"{folder}/{name}", entry))  # noqa: B023
    place = record.anchor(manifest.step)
    for section in (config.actor, config.ref, config.critic, config.teacher):
        if section is not None and is_carried(section.path):
            section.path = str(below(place, section.path))
    if is_carried(config.tokenizer_path):
        config.tokenizer_path = str(below(place, config.tokenizer_path))


def model_folder(record: Record, given: str | None) -> str:
    """Return the folder that was given, or that of the run's first model: in a cut, its own."""
    path: str = given or record.header.config["actor"]["path"]
    if not is_carried(path) or (manifest := cut_manifest(record)) is None:
        return path
    return str(below(record.anchor(manifest.step), path))


def is_carried(path: str) -> bool:
    return path.startswith(f"{MODELS}/")


def is_same_carried(recorded: Any, current: Any) -> bool:
    """Return whether an option is the path of a carried model, and of its folder here."""
    return isinstance(recorded, str) and is_carried(recorded) and str(current).endswith(f"/{recorded}")


def below(folder: Path, path: str) -> Path:
    """Return a carried path below its anchor's folder. Raises WrongModel for one that leaves it."""
    parts = PurePosixPath(path).parts
    if ".." in parts:
        raise WrongModel(f"the model {path!r} is outside of the record: do not use this file")
    return folder.joinpath(*parts)


def refuse_code(name: str, read: Any) -> None:
    """Raise WrongModel for a file of a carried model that may lead to anything but numbers."""
    path = PurePosixPath(name)
    reason = None if path.suffix in ALLOWED else "is no safetensors, JSON or text"
    if path.name in REFERENCES:
        member = REFERENCES[path.name]
        if member is None or member in parse_document(read(), name):
            reason = "names code or other files to load"
    if reason is not None:
        raise WrongModel(f"{name} {reason}, which the model of a cut record never does: do not use this file")
