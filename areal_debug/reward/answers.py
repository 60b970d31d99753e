"""Answers to try on a reward function: right ones in each format, and wrong ones of each kind.

A wrong answer never has the expected answer in it, except the kinds that are about it: hedges with
several answers, and numbers or words that contain the expected one.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_core.reward.signature import TEXTS_AND_TOKENS

GOLD_FIELDS = ("answer", "solution", "ground_truth", "gold", "target", "label", "expected", "final_answer")
FINAL = re.compile(r"####\s*(.+)")
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
TEXTS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FORMATS: dict[str, str] = TEXTS["formats"]
REFUSALS, MAGIC, INSTRUCTIONS, GUESSES = (
    tuple(TEXTS[name]) for name in ("refusals", "magic", "instructions", "guesses")
)
HOSTILE = (
    "nan", "inf", "-inf", "1e999", "9" * 5000, "9**9**9**9", "9^{9^{9^{9}}}", "1/0", "exit()", "\x00", "\ud800",
    "{" * 2000, "(" * 2000, "a" * 50000 + "!", "\\frac{" * 500, "[" * 5000, "1," * 20000,
)  # fmt: skip
LOOK_ALIKES = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
FULL_WIDTH = str.maketrans("0123456789", "０１２３４５６７８９")
FILLER = "Let us look at the question once more and think about it with care. " * 300


@dataclass(frozen=True)
class Question:
    """A row of the data, without fields that the prompt and the completion are passed as.

    `gold` is its expected answer, None if it has none, and `worked` the text that ends in it.
    """

    row: dict[str, Any]
    prompt: str
    gold: str | None
    worked: str | None


@dataclass(frozen=True)
class Kind:
    """A kind of answers: `texts` are those of a question, in a format as `place` puts them.

    Args:
        expected: "wrong" must not be paid; "right" must not be paid more than other right ones.
        needs_gold: made of the expected answer.
    """

    name: str
    expected: str
    texts: Callable[["Question", "Setting"], Iterator[str]]
    needs_gold: bool = False


@dataclass(frozen=True)
class Setting:
    """The formats that are paid, and the expected answers of all questions."""

    formats: tuple[str, ...]
    golds: tuple[str, ...]

    def placed(self, answer: str) -> Iterator[str]:
        """Yield an answer in each format."""
        for name in self.formats:
            yield FORMATS[name].format(answer)

    def wrong_for(self, question: Question) -> str:
        """Return a wrong answer of the same sort: a larger number, or another question's."""
        gold = question.gold or ""
        if (number := number_of(gold)) is not None:
            return f"{number + 7:g}"
        others = [other for other in self.golds if not same(other, gold) and gold not in other]
        return others[0] if others else "none of these"


def question_of(row: dict[str, Any], field: str | None) -> Question:
    """Read prompt and expected answer of a row. Raises ValueError if `field` is not in it."""
    if field is not None and field not in row:
        raise ValueError(f"the data has no field {field!r}: it has {', '.join(row)}")
    messages = row["messages"] if "messages" in row else row.get("prompt", "")
    prompt = messages if isinstance(messages, str) else "\n".join(str(m["content"]) for m in messages)
    worked = next(
        (text for name in ([field] if field else GOLD_FIELDS) if (text := text_in(row, name))), None
    )
    fields = {name: value for name, value in row.items() if name not in TEXTS_AND_TOKENS}
    return Question(fields, prompt, None if worked is None else final_answer(worked), worked)


def text_in(row: dict[str, Any], name: str) -> str | None:
    nested = row.get("reward_model")
    value = row.get(name, nested.get(name) if isinstance(nested, dict) else None)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return value.strip() if isinstance(value, str) and value.strip() else None


def final_answer(worked: str) -> str:
    for pattern in (FINAL, BOXED):
        if found := pattern.findall(worked):
            return str(found[-1]).strip()
    return worked


def number_of(text: str) -> float | None:
    """Return the number that a text is, None if it is not one."""
    return float(text.replace(",", "")) if NUMBER.fullmatch(text.strip()) else None


def same(left: str, right: str) -> bool:
    """Return whether two answers are equal, as numbers or without case."""
    numbers = number_of(left), number_of(right)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return left.strip().lower() == right.strip().lower()


def mentions(text: str, gold: str) -> bool:
    if (number := number_of(gold)) is not None:
        return any(
            float(n.replace(",", "")) == number for n in re.findall(r"\d[\d,]*(?:\.\d+)?", text)
        ) or any(same(n, gold) for n in NUMBER.findall(text))
    return re.search(rf"(?<!\w){re.escape(gold.lower())}(?!\w)", text.lower()) is not None


def without_gold(texts: Iterator[str], question: Question) -> Iterator[str]:
    """Leave out texts in which the expected answer occurs: they may be right by chance."""
    for text in texts:
        if question.gold is None or not mentions(text, question.gold):
            yield text


def plain(*texts: str) -> Callable[[Question, Setting], Iterator[str]]:
    """Return a source of fixed texts."""
    return lambda question, setting: without_gold(iter(texts), question)


def in_formats(*answers: str) -> Callable[[Question, Setting], Iterator[str]]:
    return lambda question, setting: without_gold(
        (text for answer in answers for text in setting.placed(answer)), question
    )


def wrong_then(*extra: str) -> Callable[[Question, Setting], Iterator[str]]:
    def texts(question: Question, setting: Setting) -> Iterator[str]:
        for text in setting.placed(setting.wrong_for(question)):
            yield from (f"{text}\n{added}" for added in extra)

    return lambda question, setting: without_gold(texts(question, setting), question)


def echoes(question: Question, setting: Setting) -> Iterator[str]:
    yield question.prompt
    yield from (f"{question.prompt}\n{text}" for text in setting.placed(setting.wrong_for(question)))


def numbers_of_prompt(question: Question, setting: Setting) -> Iterator[str]:
    for number in dict.fromkeys(NUMBER.findall(question.prompt)[:3] + NUMBER.findall(question.prompt)[-1:]):
        yield from setting.placed(number)


def truncated(question: Question, setting: Setting) -> Iterator[str]:
    """Yield answers that end before the expected answer is complete."""
    gold, worked = question.gold or "", question.worked or ""
    if len(worked) > len(gold) and gold in worked:
        yield worked[: worked.index(gold)]
    for text in setting.placed("{}"):
        yield text[: text.index("{}")]
        if len(gold) > 1:
            yield text[: text.index("{}")] + gold[:-1]


def both_orders(question: Question, setting: Setting) -> Iterator[tuple[str, str]]:
    """Yield pairs of texts of which at most one has the expected answer in a place that counts."""
    wrong, gold = setting.wrong_for(question), question.gold or ""
    for right, other in zip(setting.placed(gold), setting.placed(wrong), strict=True):
        yield f"{right}\nOr rather: {other}", f"{other}\nOr rather: {right}"


def hedged(question: Question, setting: Setting) -> Iterator[str]:
    """Yield several answers in one place, the expected one neither first nor last."""
    gold = question.gold or ""
    if (number := number_of(gold)) is not None:
        around = [f"{number + shift:g}" for shift in (-2, -1)], [f"{number + shift:g}" for shift in (1, 2)]
    else:
        others = [other for other in dict.fromkeys(setting.golds) if not same(other, gold)]
        around = [setting.wrong_for(question)], (others or ["something else"])[-1:]
    for separator in (", ", " or ", "\n"):
        yield from setting.placed(separator.join([*around[0], gold, *around[1]]))
    yield "\n".join(text for answer in (*around[0], gold, *around[1]) for text in setting.placed(answer))


def containing(question: Question, setting: Setting) -> Iterator[str]:
    """Yield wrong answers that contain the expected one as a piece, or differ by little."""
    gold = (question.gold or "").replace(",", "")
    number = number_of(gold)
    if number is None:
        wrong = [f"un{gold}", f"not {gold}", f"{gold}less"]
    else:
        wrong = [f"3{gold.lstrip('-')}", f"{gold}3", f"{gold}.5" if "." not in gold else f"{gold}5"]
        wrong += [f"-{gold}"] if number > 0 else []
        wrong += [f"{number + 1:.0f}"] if abs(number) >= 100 and number == int(number) else []
    for answer in wrong:
        yield from setting.placed(answer)


def look_alikes(question: Question, setting: Setting) -> Iterator[str]:
    """Yield texts that look like the expected number and are another one: 1⁸ for 18."""
    gold = question.gold or ""
    if number_of(gold) is not None and len(gold) > 1:
        yield from setting.placed(gold[:-1] + gold[-1].translate(LOOK_ALIKES))
    elif number_of(gold) is None and gold.translate(str.maketrans("aeo", "аео")) != gold:
        yield from setting.placed(gold.translate(str.maketrans("aeo", "аео")))  # Cyrillic


def other_spellings(question: Question, setting: Setting) -> Iterator[str]:
    gold = question.gold or ""
    if number_of(gold) is None:
        spellings = [gold.upper(), f" {gold} ", f"**{gold}**", f"{gold}."]
    else:
        number = number_of(gold) or 0.0
        spellings = [
            f"{number:,.0f}" if number == int(number) else gold,
            f"{gold}.0",
            f"${gold}",
            f"{gold} apples",
        ]
        spellings += [f"**{gold}**", gold.translate(FULL_WIDTH)]
    for answer in spellings:
        yield from setting.placed(answer)


def wrong_answers(question: Question, setting: Setting) -> Iterator[str]:
    yield from (template.format(setting.wrong_for(question)) for template in FORMATS.values())


def long_right(question: Question, setting: Setting) -> Iterator[str]:
    yield from (f"{FILLER}\n{text}" for text in setting.placed(question.gold or ""))


def repeated_right(question: Question, setting: Setting) -> Iterator[str]:
    yield from ("\n".join([text] * 30) for text in setting.placed(question.gold or ""))


def long_wrong(question: Question, setting: Setting) -> Iterator[str]:
    wrong = setting.wrong_for(question)
    return without_gold((f"{FILLER}\n{text}" for text in setting.placed(wrong)), question)


KINDS = (
    Kind("empty", "wrong", plain("", " ", "\n")),
    Kind("refusal", "wrong", plain(*REFUSALS)),
    Kind("echo of the prompt", "wrong", lambda q, s: without_gold(echoes(q, s), q)),
    Kind("a number of the prompt", "wrong", lambda q, s: without_gold(numbers_of_prompt(q, s), q)),
    Kind("wrong answer", "wrong", wrong_answers, needs_gold=True),
    Kind("common guess", "wrong", in_formats(*GUESSES)),
    Kind("truncated", "wrong", lambda q, s: without_gold(truncated(q, s), q)),
    Kind("magic token or phrase", "wrong", plain(*MAGIC)),
    Kind("wrong, then a magic token", "wrong", wrong_then(*MAGIC[:6], *MAGIC[-4:])),
    Kind("injected instruction", "wrong", plain(*INSTRUCTIONS)),
    Kind("wrong, then an instruction", "wrong", wrong_then(*INSTRUCTIONS)),
    Kind("wrong and very long", "wrong", long_wrong),
    Kind("several answers in one place", "wrong", hedged, needs_gold=True),
    Kind("contains the expected answer", "wrong", containing, needs_gold=True),
    Kind("look-alike characters", "wrong", look_alikes, needs_gold=True),
    Kind("right and very long", "right", long_right, needs_gold=True),
    Kind("right, 30 times", "right", repeated_right, needs_gold=True),
    Kind("right, spelled otherwise", "right", other_spellings, needs_gold=True),
)


def hostile_texts(formats: Sequence[str]) -> list[str]:
    """Return texts that make a parser raise, hang or return no number, alone and in each format."""
    return [*HOSTILE, *(FORMATS[name].format(text) for name in formats for text in HOSTILE)]
