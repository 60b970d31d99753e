"""Check one recorded step against the float64 twin and the code of other frameworks."""

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from recorder.environment import folder_identity
from replayer.crosscheck.frameworks import FRAMEWORKS
from replayer.crosscheck.model_pass import ModelPass, load_pass
from replayer.crosscheck.opinions import Comparison, Crosscheck, Opinion
from replayer.crosscheck.step_rows import StepRows
from replayer.crosscheck.their_configs import Configured, options_of
from replayer.crosscheck.twin import advantages_of
from replayer.errors import WrongModel

TWIN = "float64"
OPINIONS = (TWIN, *FRAMEWORKS)


def parse_opinions(text: str) -> tuple[str, ...]:
    """Parse names divided by commas. Raises ValueError for an unknown one."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    if not names or any(name not in OPINIONS for name in names):
        raise ValueError(f"--with {text} names nobody who recomputes: choose from {', '.join(OPINIONS)}")
    return names


def crosscheck(rows: StepRows, opinions: Sequence[str], model: str | None = None) -> Crosscheck:
    """Recompute a step with each of the `opinions`.

    Args:
        model: folder of the weights that the step starts from; by default that of the recorded run,
            for the step that starts from it.

    Raises:
        ValueError: the record has no configuration that is read here, or the model is another one.
        ModuleNotFoundError: a framework is not installed.
    """
    frameworks = [FRAMEWORKS[name]() for name in opinions if name != TWIN]
    configured = options_of(rows.origin)
    loaded, no_model = find_model(rows, configured, model)
    if loaded is not None and "current_logp" not in rows.tensors:
        current, noise = loaded.logprobs(rows)
        rows = replace(rows, tensors=rows.tensors | {"current_logp": current}, noise=noise)
    twin = Comparison(rows, configured, None, loaded, no_model)
    own, notes = twin.run(), []
    stage = next(stage for stage in own.stages if stage.stage == "advantages")
    if "advantages" not in rows.tensors and not stage.is_unexplained:
        found = advantages_of(rows, twin.explained).value.astype(np.float32).astype(np.float64)
        rows = replace(rows, tensors=rows.tensors | {"advantages": found})
        notes.append("the record has statistics of its advantages; those of the twin agree and are used here")
    others = [Comparison(rows, configured, framework, loaded, no_model).run() for framework in frameworks]
    listed: list[Opinion] = [own, *others] if TWIN in opinions else others
    return Crosscheck(rows.step, tuple(listed), tuple(notes) if others else ())


def find_model(rows: StepRows, configured: Configured, given: str | None) -> tuple[ModelPass | None, str]:
    """Load the weights that a step starts from; None with the reason if they are not at hand.

    Raises WrongModel if the folder for a step that starts from the run's model is another one.
    """
    origin = rows.origin
    actor = origin.config["actor"] if configured.trainer is None else {}
    if actor.get("use_lora"):
        return None, "an adapter was trained, which is not recomputed here"
    if configured.dtype != "float32":
        return None, (
            "the record has no log-probs of the weights that the step starts from, and a model that "
            f"computed in {configured.dtype or 'an unknown dtype'} cannot be recomputed closely enough"
        )
    path = given or (origin.model_path if origin.starts_from_model else None)
    if not path or not os.path.isdir(path):
        if given:
            raise WrongModel(f"{given} is not a folder on this machine: give one with a model to --model")
        return None, (
            "the weights that the step starts from are not at hand: give a folder with them with "
            "--model, or record the current log-probs"
        )
    if origin.starts_from_model:
        files = folder_identity(path)["files"]
        if names := [name for name, identity in origin.model_files.items() if files.get(name) != identity]:
            raise WrongModel(
                f"{path} is not the model that the step starts from: {', '.join(names[:3])} differ; "
                "give the right one with --model"
            )
    return load_pass(path, float(actor.get("temperature", 1.0))), ""
