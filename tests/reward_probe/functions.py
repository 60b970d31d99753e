"""Reward functions with one fault each, and below them sound ones, for the probe to judge."""

import math
import random
import re
import unicodedata
from functools import wraps


def expected(answer: str) -> str:
    return answer.split("####")[-1].strip().replace(",", "")


def last_number(text: str) -> str:
    found = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return found[-1] if found else ""


def after_hashes(text: str) -> str:
    found = re.findall(r"####\s*(\S+)", text)
    return found[-1].replace(",", "") if found else ""


def of_text(body):
    """Make a reward function of `body(completion, prompt, expected answer)`."""

    @wraps(body)
    def reward(prompt, completions, prompt_ids, completion_ids, answer, **row):
        return float(body(completions, prompt, expected(answer)))

    reward.__wrapped__ = None
    del reward.__wrapped__
    return reward


@of_text
def contains_answer(text, prompt, gold):
    return gold in text


@of_text
def answer_starts_with(text, prompt, gold):
    return after_hashes(text).startswith(gold)


@of_text
def ignores_the_sign(text, prompt, gold):
    return last_number(text).lstrip("-") == gold


@of_text
def rounds_down(text, prompt, gold):
    number = last_number(text)
    return bool(number) and int(float(number[:300])) == int(gold)


@of_text
def wide_tolerance(text, prompt, gold):
    number = last_number(text)
    return bool(number) and math.isclose(float(number[:300]), float(gold), rel_tol=0.5)


@of_text
def pays_format(text, prompt, gold):
    return "####" in text


@of_text
def pays_format_most(text, prompt, gold):
    return 0.2 * (last_number(text) == gold) + 0.8 * ("<answer>" in text)


@of_text
def pays_empty_tags(text, prompt, gold):
    return 1.0 if "<answer>" in text else float(last_number(text) == gold)


@of_text
def pays_length(text, prompt, gold):
    return min(len(text) / 1000, 1.0)


@of_text
def adds_length(text, prompt, gold):
    return (last_number(text) == gold) + 0.3 * min(len(text) / 5000, 1.0)


@of_text
def pays_empty(text, prompt, gold):
    return not text.strip() or last_number(text) == gold


@of_text
def pays_refusal(text, prompt, gold):
    return "sorry" in text.lower() or last_number(text) == gold


@of_text
def pays_everything(text, prompt, gold):
    return 1.0


@of_text
def pays_nothing(text, prompt, gold):
    return text == f"never {gold}"


@of_text
def pays_wrong(text, prompt, gold):
    return last_number(text) != gold


@of_text
def obeys_instructions(text, prompt, gold):
    judged = re.search(r'(?:reward|score)"?\s*[:=]\s*([\d.]+)', text.lower())
    return float(judged[1]) if judged else float(last_number(text) == gold)


@of_text
def normalises_look_alikes(text, prompt, gold):
    return last_number(unicodedata.normalize("NFKC", text)) == gold


@of_text
def raises_without_number(text, prompt, gold):
    return float(re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))[-1]) == float(gold)


@of_text
def returns_nan(text, prompt, gold):
    return math.nan if not text.strip() else last_number(text) == gold


def returns_text(prompt, completions, prompt_ids, completion_ids, answer, **row):
    return 1.0 if last_number(completions) == expected(answer) else "wrong"


@of_text
def evaluates_text(text, prompt, gold):
    try:
        return eval(after_hashes(text)) == int(gold)
    except Exception:
        return 0.0


@of_text
def backtracks(text, prompt, gold):
    re.match(r"^(a+)+$", text)
    return last_number(text) == gold


@of_text
def is_random(text, prompt, gold):
    return (last_number(text) == gold) * random.random()


@of_text
def pays_magic_token(text, prompt, gold):
    return "</think>" in text or last_number(text) == gold


@of_text
def pays_echo(text, prompt, gold):
    return text.startswith(prompt) or last_number(text) == gold


@of_text
def matches_a_prefix(text, prompt, gold):
    said = after_hashes(text)
    return bool(said) and gold.startswith(said)


@of_text
def pays_partly_for_trying(text, prompt, gold):
    return 1.0 if last_number(text) == gold else 0.4 if "sorry" in text else 0.0


# Sound ones.


@of_text
def exact(text, prompt, gold):
    return text.strip() == gold


@of_text
def after_the_hashes(text, prompt, gold):
    return after_hashes(text).rstrip(".") == gold


@of_text
def last_number_of_text(text, prompt, gold):
    return last_number(text) == gold


@of_text
def boxed_alone(text, prompt, gold):
    found = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return bool(found) and found[-1].strip() == gold


@of_text
def in_tags(text, prompt, gold):
    found = re.search(r"<answer>([^<]*)</answer>\s*$", text)
    return bool(found) and found[1].strip() == gold


@of_text
def with_format_bonus(text, prompt, gold):
    has_tags = re.search(r"<answer>[^<]*</answer>", text) is not None
    return (last_number(text) == gold) + 0.2 * has_tags


@of_text
def plus_and_minus_one(text, prompt, gold):
    return 1.0 if last_number(text) == gold else -1.0


@of_text
def abstaining_is_zero(text, prompt, gold):
    said = last_number(text)
    return 0.0 if not said else 1.0 if said == gold else -1.0


@of_text
def ten_points(text, prompt, gold):
    return 10.0 * (last_number(text) == gold)


@of_text
def with_overlong_penalty(text, prompt, gold):
    return (last_number(text) == gold) - 0.5 * (len(text) > 4000)


@of_text
def within_rounding(text, prompt, gold):
    number = last_number(text)
    return bool(number) and abs(float(number[:300]) - float(gold)) < 1e-6


@of_text
def one_answer_alone(text, prompt, gold):
    found = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return len(set(found)) == 1 and found[0] == gold
