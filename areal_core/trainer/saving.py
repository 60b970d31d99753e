"""Models in Hugging Face format, saved at the periods of `saver`.

```
{fileroot}/checkpoints/{user}/{experiment}/{trial}/
  default/globalstep41/   the policy, or the only model, after step 41
  critic/globalstep41/    another model that the run trains
```
"""

import threading
from functools import partial

from transformers import PreTrainedTokenizerBase

from areal_core.config import BaseExperimentConfig
from areal_core.engine.background_save import BackgroundSave
from areal_core.engine.checkpoint import Engines
from areal_core.engine.hf_folder import HFFolder, take_hf
from areal_core.paths import run_folder
from areal_core.trainer.frequency import Frequency


class Saver:
    """Writes models, on every rank; with `saver.mode` "async" in a thread of rank 0."""

    def __init__(
        self,
        config: BaseExperimentConfig,
        engines: Engines,
        tokenizer: PreTrainedTokenizerBase,
        frequency: Frequency,
    ) -> None:
        self.folder = run_folder(config, "checkpoints")
        self.is_async = config.saver.mode == "async"
        self.engines, self.tokenizer, self.frequency = engines, tokenizer, frequency
        self._last_step: int | None = None
        self._writing = BackgroundSave()

    def save_when_due(self, step: int) -> None:
        """Write the models after `step` if one of `saver.freq_*` has passed; a collective.

        Raises the error of writing the previous ones, if there was one.
        """
        self._writing.finished()
        if self.frequency.is_due(step):
            self._last_step = step
            self.save(f"globalstep{step}")

    def save_last(self, step: int) -> None:
        """Write the models after the run's last `step`, if not yet written; a collective.

        Without a period of `saver` none are written.
        """
        if self.frequency.is_set and self._last_step != step:
            self.save(f"globalstep{step}")

    def save(self, name: str) -> None:
        """Write the models to folders of that name; a collective."""
        self._writing.wait()
        folders = [
            take_hf(self.folder / ("default" if model == "actor" else model) / name, engine, self.tokenizer)
            for model, engine in self.engines.items()
        ]
        self._writing.start(self.folder, partial(write_all, folders))
        if not self.is_async:
            self._writing.wait()

    def finish(self) -> None:
        """Wait for the models that are being written."""
        self._writing.wait()

    def close(self) -> None:
        """End the writing thread, if there is one."""
        self._writing.close()


def write_all(folders: list[HFFolder], given_up: threading.Event) -> None:
    """Write the models, unless `given_up` is set."""
    for folder in folders:
        if not given_up.is_set():
            folder.write()
