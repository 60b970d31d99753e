"""Reward functions that pay for right answers alone, each in its own way."""

import re

from .faulty import after_hashes, last_number, of_text


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
