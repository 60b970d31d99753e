"""The journal of a judge: each call as a line of JSON, in a file per prompt.

All samples of a prompt run in one thread of one rank, so a file has one writer. Where an episode
ran again (after a restart), its last lines count.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from areal_core.errors import RewardError
from areal_core.safety.durable import append_lines


@dataclass(frozen=True)
class JudgeCall:
    """One call: `version` of the policy's weights; `score` None if the reply has none."""

    prompt_id: int
    sample_id: int
    attempt: int
    version: int
    text: str
    reply: str
    score: float | None


class Journal:
    """Writes calls to `folder/{prompt_id}.jsonl`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, call: JudgeCall) -> None:
        """Append one call to the file of its prompt."""
        self.folder.mkdir(parents=True, exist_ok=True)
        line = json.dumps(asdict(call), ensure_ascii=False) + "\n"
        append_lines(self.folder / f"{call.prompt_id}.jsonl", line)


class JournalReader:
    """Finds calls in a folder that `Journal` wrote; each file is read once.

    Raises:
        RewardError: there is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise RewardError(f"{folder} is no folder of a judge's journal: give the one that a run wrote")
        self.folder = folder
        self._calls: dict[int, dict[tuple[int, int], JudgeCall]] = {}

    def find(self, prompt_id: int, sample_id: int, attempt: int, text: str) -> JudgeCall:
        """Return a call.

        Raises:
            RewardError: it is not in the journal, or was made with another text.
        """
        if prompt_id not in self._calls:
            calls = read_calls(self.folder / f"{prompt_id}.jsonl")
            self._calls[prompt_id] = {(call.sample_id, call.attempt): call for call in calls}
        name = f"prompt {prompt_id}, sample {sample_id}, attempt {attempt}"
        call = self._calls[prompt_id].get((sample_id, attempt))
        if call is None:
            raise RewardError(
                f"{self.folder} has no call of {name}: the run that wrote it judged other samples"
            )
        if call.text != text:
            at = next((i for i, (a, b) in enumerate(zip(call.text, text, strict=False)) if a != b), None)
            at = min(len(call.text), len(text)) if at is None else at
            raise RewardError(
                f"{self.folder}: {name} asked {call.text[at : at + 80]!r} at character {at}, and now asks "
                f"{text[at : at + 80]!r}: the recorded reply is to another text"
            )
        return call

    def of_sample(self, prompt_id: int, sample_id: int) -> list[JudgeCall]:
        """Return the calls for a sample, the last one of each attempt. Raises RewardError."""
        calls = read_calls(self.folder / f"{prompt_id}.jsonl")
        return list({call.attempt: call for call in calls if call.sample_id == sample_id}.values())


def read_calls(file: Path) -> list[JudgeCall]:
    """Return the calls of one file in their order, [] without the file. Raises RewardError."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    return [parse_call(line, f"{file}, line {number}") for number, line in enumerate(lines, start=1)]


def parse_call(line: str, where: str) -> JudgeCall:
    """Return the call of a line. Raises RewardError."""
    try:
        found: Any = json.loads(line)
    except ValueError as error:
        raise RewardError(f"{where} is not JSON: {error}") from None
    expected = {field.name for field in fields(JudgeCall)}
    if not isinstance(found, dict) or found.keys() != expected:
        raise RewardError(f"{where} is not a judge's call: expected {', '.join(sorted(expected))}")
    return JudgeCall(**found)
