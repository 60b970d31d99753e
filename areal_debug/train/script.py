"""One rank of a training script: `python -m areal_debug.train.script SCRIPT.py ARGUMENTS`.

An error that a user can cause ends the rank with one sentence and exit code 2, damage and failures
of a run with code 1, instead of a traceback per rank. Other errors keep their traceback.
"""

import logging
import os
import runpy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from areal_core.safety.printable import printable_block
from areal_debug.start_up import collect_garbage_rarely

SMALLER = (
    "lower actor.mb_spec.max_tokens_per_mb, or set actor.gradient_checkpointing=true or "
    "actor.optimizer.offload=true; `train --dry-run` estimates what needs how much"
)


def main(arguments: list[str]) -> None:
    """Run the script as `__main__`, with its own arguments and its folder on the path."""
    collect_garbage_rarely()
    script = arguments[0]
    sys.argv = arguments
    # The command has printed the notes once.
    logging.getLogger("areal_core.config").setLevel(logging.ERROR)
    sys.path.insert(0, str(Path(script).resolve().parent))
    sys.path.append(os.getcwd())  # last: it hides no installed package
    with mistakes_as_sentences():
        runpy.run_path(script, run_name="__main__")


@contextmanager
def mistakes_as_sentences() -> Iterator[None]:
    """Print errors that our packages raise for users as one sentence, on the first such rank."""
    from areal_core.agent.errors import AgentError
    from areal_core.errors import (
        CheckpointNotWritten,
        ConfigError,
        DatasetError,
        EngineError,
        ImageError,
        MiscomputedError,
        NonFiniteError,
        RewardError,
        RewardFailed,
        first_line,
    )
    from areal_core.rollout import errors as rollout
    from areal_core.safety.durable import ADVICE, os_error_of, sentence_of
    from areal_core.safety.file_names import UnsafeName
    from areal_core.safety.private import ForeignOwner
    from recorder import DamagedRecord, RecordError
    from replayer.errors import ReplayError

    try:
        yield
    except (DamagedRecord, CheckpointNotWritten) as error:
        end(f"Error: {error}", 1)
    except OSError as error:
        if type(error.__cause__).__module__.startswith("huggingface_hub"):
            end(
                f"Error: a model or tokenizer is neither a folder here nor on the hub: {first_line(error)}", 2
            )
        if error.errno not in ADVICE:
            raise
        end(f"Error: {sentence_of(error)}", 1)  # another attempt may find a disk with space
    except (
        RewardFailed,
        MiscomputedError,
        NonFiniteError,
        rollout.ServerDied,
        rollout.WeightUpdateFailed,
        rollout.RequestRefused,
        rollout.NothingAccepted,
        rollout.RolloutStuck,
    ) as error:
        end(f"Error: {error}{notes_of(error)}", 1)
    except (
        rollout.NoServers,
        rollout.UnsupportedSampling,
        rollout.PromptTooLong,
        rollout.MalformedEpisode,
        ConfigError,
        DatasetError,
        ImageError,
        RewardError,
        EngineError,
        AgentError,
        RecordError,
        ReplayError,
        ForeignOwner,
        UnsafeName,
    ) as error:
        end(f"Error: {error}{notes_of(error)}", 2)
    except (RuntimeError, MemoryError, ImportError) as error:
        if cause := os_error_of(error):
            end(f"Error: {sentence_of(cause)}", 1)
        if type(error).__name__ != "OutOfMemoryError":  # of torch, which need not be loaded here
            raise
        end(f"Error: the device's memory is full: {str(error).split('. ')[0]}; {SMALLER}", 1)


def show_mistakes_as_sentences() -> None:
    """Let an uncaught error of a script, by `python` or torchrun, end it as the command would."""
    if sys.excepthook is sys.__excepthook__:  # no debugger or notebook has its own

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            try:
                with mistakes_as_sentences():
                    raise error.with_traceback(trace)
            except BaseException:
                sys.__excepthook__(kind, error, trace)

        sys.excepthook = hook


def notes_of(error: Exception) -> str:
    return "".join(f" ({note})" for note in getattr(error, "__notes__", ()))


def end(message: str, code: int) -> None:
    """Print the message and exit at once.

    Other ranks may wait in a collective, and a clean exit would wait for them.
    """
    from areal_core.safety.secrets import masker

    if os.environ.get("RANK", "0") != "0":
        time.sleep(2)  # a mistake of all ranks is printed once: torchrun ends this rank meanwhile
    print(printable_block(masker().text(message)), file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
