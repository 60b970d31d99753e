"""Write the models of a cut record: model files as they are, or the weights of an engine."""

import json
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from areal_core.engine.checkpoint.hf_folder import HFFolder, saved_buffers
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.full_weights import FullTensors
from areal_core.trainer.rl import PPOTrainer
from replayer.bug.carried import ALLOWED, MODELS, REFERENCES
from replayer.errors import ReplayError

WEIGHTS = (".safetensors", ".bin", ".index.json")
OWN_NAMES = ("_name_or_path", "name_or_path")  # members of JSON files with the folder of a model


def write_models(trainer: PPOTrainer, anchor: Path, is_first: bool) -> dict[str, str]:
    """Write what the trainer needs besides its checkpoint below an anchor; a collective.

    The actor's folder has the weights of now, unless it trains an adapter: then those of the base.

    Args:
        is_first: the weights are still those of the model files, which are copied as they are.

    Returns:
        The new path of each model in the config: "actor", "ref", "teacher", "critic", "tokenizer".
    """
    config, actor = trainer.config, trainer.actor
    source = config.actor.path
    if actor.adapter is not None and (config.actor.init_from_scratch or not Path(source).is_dir()):
        raise ReplayError(
            f"the base model of the adapter is {source!r}, which is no folder: give its folder with --model"
        )
    as_it_is = (is_first or actor.adapter is not None) and not config.actor.init_from_scratch
    paths = {"actor": f"{MODELS}/actor"}
    write_model(actor, source, anchor / paths["actor"], as_it_is, trainer.tokenizer)
    scorers = {"ref": (config.ref, trainer.reference), "teacher": (config.teacher, trainer.teacher)}
    for name, (section, engine) in scorers.items():
        if section is None:
            continue
        is_actors = section.path == source and (as_it_is or not isinstance(engine, FSDPEngine))
        paths[name] = paths["actor"]
        if isinstance(engine, FSDPEngine) and not is_actors:
            paths[name] = f"{MODELS}/{name}"
            write_model(engine, section.path, anchor / paths[name], True, None)
    if config.critic is not None and trainer.critic is not None:
        # its weights are in the checkpoint; only its architecture is read
        paths["critic"] = paths["actor"]
        if config.critic.path != source:
            paths["critic"] = f"{MODELS}/critic"
            write_model(trainer.critic, config.critic.path, anchor / paths["critic"], True, None)
    if config.tokenizer_path and config.tokenizer_path != source:
        paths["tokenizer"] = f"{MODELS}/tokenizer"
        if trainer.ranks.rank == 0:
            write_tokenizer(trainer.tokenizer, config.tokenizer_path, anchor / paths["tokenizer"])
    elif config.tokenizer_path:
        paths["tokenizer"] = paths["actor"]
    if trainer.ranks.rank == 0:
        for file in (anchor / MODELS).rglob("*.json"):
            clean(file)
    return paths


def write_model(
    engine: FSDPEngine,
    source: str,
    folder: Path,
    as_it_is: bool,
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Write a model, and its tokenizer if one is given; a collective.

    Args:
        as_it_is: copy the files of `source`, if that is a folder of safetensors files.
    """
    copies = as_it_is and Path(source).is_dir() and any(Path(source).glob("*.safetensors"))
    if copies:
        if engine.ranks.rank == 0:
            files = [path for path in sorted(Path(source).iterdir()) if is_carried_file(path)]
            copy_files([path for path in files if tokenizer is not None or is_of_model(path)], folder)
        return
    # float32: the master weights, to the bit
    tensors = FullTensors(engine.model, torch.float32, engine.ranks.device)
    weights = {name: tensor.cpu() for name, tensor in tensors if engine.ranks.rank == 0}
    if engine.ranks.rank == 0:
        HFFolder(folder, engine.model, weights | saved_buffers(engine.model), None, None).write()
        if tokenizer is not None:
            write_tokenizer(tokenizer, source, folder)


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, source: str, folder: Path) -> None:
    if not Path(source).is_dir():
        tokenizer.save_pretrained(folder)
        return
    files = [path for path in sorted(Path(source).iterdir()) if is_carried_file(path)]
    copy_files([path for path in files if not is_of_model(path)], folder)


def is_carried_file(path: Path) -> bool:
    carried = path.is_file() and path.suffix in ALLOWED
    return carried and REFERENCES.get(path.name, "") is not None


def is_of_model(path: Path) -> bool:
    return path.name.endswith(WEIGHTS) or path.name in ("config.json", "generation_config.json")


def copy_files(files: list[Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, folder / file.name)


def clean(file: Path) -> None:
    """Remove from a JSON file of a model the folder that it was in, and what names code to load."""
    if file.name not in REFERENCES:
        return
    document = json.loads(file.read_text())
    unwanted = {*OWN_NAMES, REFERENCES[file.name]} & document.keys()
    if unwanted:
        kept = {name: value for name, value in document.items() if name not in unwanted}
        file.write_text(json.dumps(kept, indent=2, ensure_ascii=False))


def engines_without_weights(trainer: PPOTrainer) -> list[str]:
    return ["actor"] if trainer.actor.adapter is None else []
