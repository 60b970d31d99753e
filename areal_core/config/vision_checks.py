"""Families of vision models; refusal of models and pictures that cannot be used together."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_core.config.experiment import BaseExperimentConfig, RWConfig
from areal_core.config.train_engine import TrainEngineConfig


@dataclass(frozen=True)
class VisionFamily:
    """One family.

    Args:
        types_option: the option of its class's forward for the types of tokens.
        has_grids: pictures have their own sizes, `image_grid_thw`, and tokens positions in three
            dimensions. Otherwise all pictures have one size.
        attends_within_images: the tokens of a picture attend to each other in both directions.
        nests_tower: published checkpoints have the tower's weights one module deeper.
    """

    types_option: str
    has_grids: bool
    attends_within_images: bool
    nests_tower: bool = False


QWEN = VisionFamily("mm_token_type_ids", has_grids=True, attends_within_images=False)
# model_type in Transformers -> facts
FAMILIES = {
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
    "gemma3": VisionFamily("token_type_ids", has_grids=False, attends_within_images=True, nests_tower=True),
}
IMAGE_DATASETS = ("clevr_count_70k", "geometry3k", "virl39k")
GENERATED = "shapes"


def images_in_use(config: BaseExperimentConfig) -> Iterator[str]:
    """Yield a sentence for each model or dataset with images that the run cannot use."""
    sections = {name: s for name, s in vars(config).items() if isinstance(s, TrainEngineConfig)}
    for name, section in sections.items():
        family = model_type(section.path, "vision_config")
        if family is None:
            continue
        if family not in FAMILIES:
            yield (
                f"{name}.path is {section.path!r}, a vision model of type {family!r}, which is not supported: "
                f"train one of {', '.join(FAMILIES)}, or a text model"
            )
        if name == "critic" or section.is_critic or isinstance(config, RWConfig):
            yield (
                f"{name}.path is {section.path!r}, a vision model, and scores and values of images are not "
                f"supported: use a text model, or advantages without a critic"
            )
    actor = sections["actor"].path if "actor" in sections else ""
    for path in config.evaluator.checkpoints or ():
        kinds = model_type(actor, "vision_config"), model_type(path, "vision_config")
        if model_facts(actor) and model_facts(path) and kinds[0] != kinds[1]:
            names = [f"a vision model of type {kind!r}" if kind else "a text model" for kind in kinds]
            yield (
                f"evaluator.checkpoints has {path!r}, {names[1]}, and actor.path {actor!r} is {names[0]}: "
                f"evaluate it by itself, with actor.path={path}"
            )
    if model_type(actor) is None or model_type(actor, "vision_config") is not None:
        return
    for name in ("train_dataset", "valid_dataset"):
        data = getattr(config, name)
        if data is not None and is_of_images(data.path):
            yield (
                f"{name}.path is {data.path!r}, a dataset of images, and actor.path {actor!r} is a text "
                f"model: train a vision model ({', '.join(FAMILIES)})"
            )


def is_of_images(path: str) -> bool:
    """Return whether a path names a dataset that is known to have pictures."""
    return path == GENERATED or any(known in path.lower() for known in IMAGE_DATASETS)


def model_type(path: str, option: str = "model_type") -> str | None:
    """Return the `model_type` of a folder whose `config.json` has an option; None for any other."""
    facts = model_facts(path)
    return str(facts.get("model_type")) if option in facts else None


def model_facts(path: str) -> dict[str, Any]:
    """Return the `config.json` of a folder; empty where there is none to read."""
    file = Path(path) / "config.json"
    if not path or not file.is_file():
        return {}
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:  # the model's loader reports it
        return {}
    return facts if isinstance(facts, dict) else {}
