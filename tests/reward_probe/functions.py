"""The reward functions of `functions.toml`, as the probe imports them."""

import math
import random
import re
import tomllib
import unicodedata
from pathlib import Path

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def expected(answer: str) -> str:
    return answer.split("####")[-1].strip().replace(",", "")


def numbers(text: str) -> list[str]:
    return re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))


def last_number(text: str) -> str:
    return (numbers(text) or [""])[-1]


def value(text: str) -> float:
    """Return the last number; NaN without any."""
    return float(last_number(text)[:300] or "nan")


def after_hashes(text: str) -> str:
    found = re.findall(r"####\s*(\S+)", text)
    return found[-1].replace(",", "") if found else ""


USED = (math, random, re, unicodedata, numbers, last_number, value, after_hashes)
HELPERS = {one.__name__: one for one in USED}


def of_text(pays: str):
    """Make a reward function of an expression."""
    code = compile(pays, "functions.toml", "eval")

    def reward(prompt, completions, prompt_ids, completion_ids, answer, **row):
        names = {"text": completions, "prompt": prompt, "gold": expected(answer)}
        return float(eval(code, HELPERS | names))

    return reward


globals().update({name: of_text(row["pays"]) for name, row in TABLE["faulty"].items() if "pays" in row})
globals().update({name: of_text(pays) for name, pays in TABLE["sound"].items()})


def returns_text(prompt, completions, prompt_ids, completion_ids, answer, **row):
    return 1.0 if last_number(completions) == expected(answer) else "wrong"


def evaluates_text(prompt, completions, prompt_ids, completion_ids, answer, **row):
    try:
        return float(eval(after_hashes(completions)) == int(expected(answer)))
    except Exception:
        return 0.0
