"""Refusal of models and data with images, which no trainer, workflow or record here can hold."""

import json
from collections.abc import Iterator
from pathlib import Path

from areal_core.config.experiment import BaseExperimentConfig
from areal_core.config.train_engine import TrainEngineConfig

IMAGE_DATASETS = ("clevr_count_70k", "geometry3k", "virl39k")
# Parts of hub names, for models that are not in a local folder.
IMAGE_MODELS = ("-vl-", "_vl_", "smolvlm", "llava", "internvl", "paligemma", "pixtral", "idefics")
INSTEAD = "images are not supported: train a text model on text"


def images_in_use(config: BaseExperimentConfig) -> Iterator[str]:
    """Yield one sentence that names all datasets and models with images, if there are any."""
    found: dict[str, str] = {}  # path -> sentence, because several sections have the same one
    for name in ("train_dataset", "valid_dataset"):
        data = getattr(config, name)
        if data is not None and any(part in data.path.lower() for part in IMAGE_DATASETS):
            found.setdefault(data.path, f"{name}.path is {data.path!r}, a dataset of images")
    for name, section in vars(config).items():
        if isinstance(section, TrainEngineConfig) and (reason := why_vision(section.path)):
            found.setdefault(section.path, f"{name}.path is {section.path!r}, a vision model ({reason})")
    if found:
        yield f"{', and '.join(found.values())}; {INSTEAD}"


def why_vision(path: str) -> str:
    """Return why a model is one of vision: its `config.json`, or else its name; "" if it is not."""
    file = Path(path) / "config.json"
    if path and file.is_file():
        try:
            facts = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:  # the model's loader reports it
            return ""
        has_vision = isinstance(facts, dict) and "vision_config" in facts
        return f"{facts.get('model_type')} with vision_config" if has_vision else ""
    name = f"{Path(path).name}-".lower()
    return "by its name" if any(part in name for part in IMAGE_MODELS) else ""
