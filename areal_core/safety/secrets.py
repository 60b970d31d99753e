"""Mask credentials in whatever is stored, shown or sent, and count what was masked.

A value is masked because of its name (`wandb_api_key`, `--hf-token`, `Authorization:`), its shape
(`hf_...`, `sk-...`, a private key, `scheme://user:secret@host`), or because it is the value of such
a name elsewhere: a token of the environment is also found in the middle of a log line.
"""

import json
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote

MASK = "***"
# Lengths of secrets that are masked wherever they reappear; others are masked by name or form only.
SHORTEST_VALUE, LONGEST_VALUE = 8, 1000
MOST_FOUND = 100  # secrets of texts that are searched for in later ones, at a cost in each of them
LONGEST_CLEAN, MOST_CLEAN = 500, 100_000  # of texts that are kept because they have no secret

# Words of a name that make it one of a credential, unless the last word says that it is about one.
STRONG = re.compile(
    r"password|passwd|passphrase|secrets?|credentials?|apikey|authorization|cookie|jwt"
    r"|(?:api|access|secret|private|admin|auth|wandb|openai|anthropic|swanlab|hf|account)keys?"
    r"|(?:api|access|auth|hf|github|bot|session|refresh|bearer)token|\w+(?:password|passwd|secret)"
)
ABOUT = re.compile(
    r"path|file|dir|folder|names?|type|mode|timeout|length|size|len|count|ttl|expiry|seconds|s|min|max"
    r"|enabled|version"
)
# Words before `key` that make it a credential: a key alone is often that of a row or a table.
KEYS = re.compile(
    r"api|access|secret|private|admin|auth|account|master|encryption|signing|shared|service|license"
    r"|session|hf|wandb|openai|anthropic|swanlab|storage|deploy"
)
# Words before `token` that make it one of a vocabulary or of a text.
VOCABULARY = re.compile(
    r"eos|bos|pad|padding|unk|sep|separator|cls|mask|special|stop|end|start|image|video|audio|think|per"
    r"|next|first|last|prompt|by|one|each|every|new"
)
PARAMETERS = re.compile(
    r"(?i)key|sig|signature|token|auth|code|code_verifier|x-(?:amz|goog)-(?:signature|credential|security-token)"
)
NOT_SECRET = frozenset(["", "none", "null", "true", "false", "empty", "unset", "required", "any", "n/a"])
REFERENCE = re.compile(r"\$(?:\{[^}]*\}?|[A-Za-z_]\w*)$|\*{3,}$|<[^>]*>?$")

SHAPES = re.compile(
    r"(?<![\w-])(?:"
    r"hf_[A-Za-z0-9]{30,}"
    r"|sk-(?=[\w-]{0,60}\d)[\w-]{20,}"
    r"|gh[oprsu]_[A-Za-z0-9]{36,}|github_pat_\w{22,}|glpat-[\w-]{20,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}(?:[\"'\s:,=/]{1,6}[A-Za-z0-9/+]{40}(?![\w/+]))?(?!\w)"
    r"|xox[abeoprs]-[\w-]{10,}|AIza[\w-]{35}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,}|nvapi-[\w-]{40,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]*)?"
    r")"
)
PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----.*?"
    r"(?:-----END [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)
WANDB_LOGIN = re.compile(r"(?i)(\bwandb\W{1,4}(?:login|key|api)\b[^\n]{0,40}?)\b[0-9a-f]{40}\b")
BEARER = re.compile(r"(?i)\b((?:bearer|basic)\s{1,4})(?=[\w.~+/=-]{0,60}[\d=])([\w.~+/=-]{12,})")
HEADER = re.compile(
    r"(?i)(\b(?:proxy-)?authorization\\*[\"']?\s{0,4}:\s{0,4}\\*[\"']?)(?!\*\*\*)([^\s\"'\\][^\r\n\"'\\]*)"
    r"|(\b(?:set-)?cookie\\*[\"']?:\s{0,4}\\*[\"']?)(?!\*\*\*)([^\s\"'\\][^\r\n\"'\\]*)"
)
# s3://KEY:SECRET@bucket first: a secret of S3 may have slashes
URL = re.compile(
    r"(?i)(\bs3[an]?://)(?!\*\*\*)[^\s:@/\"'<>]{1,200}:[^\s@\"'<>]{1,200}@"
    r"|(\b[a-z][a-z0-9+.-]{0,20}://)(?!\*\*\*@)[^\s:@/\"'<>]*:[^\s/\"'<>]*@"
    r"|(\bhttps?://)(?!\*\*\*@)[^\s:@/\"'<>]+@"
)
PARAMETER = re.compile(r"([?&;])([A-Za-z][\w.%-]{0,63})=([^&#\s\"'<>;\\]+)")
# NAME=value, name: "value", and the same with the quotes of JSON inside of a string
ASSIGNED = re.compile(
    r"(?<![\w.$-])(-{0,2}[A-Za-z_][\w.-]{0,99})\\*[\"']?\s{0,4}(?:(?<!:):(?!//|:)|=(?!=))\s{0,4}"
)
ASSIGNED_VALUE = re.compile(
    r"(?P<quote>\\*[\"'])(?P<quoted>(?:(?!(?P=quote))(?:\\.|[^\n]))*)"
    r"|(?P<plain>\$\{[^}\s]*\}|[^\s,;&\"'<>{}()\[\]\\]+)(?P<call>[(\[])?"
)
# `--name value`; in a log line the value must look like a secret: a sentence may continue there
DASHED = re.compile(r"(?<![\w-])(--?[A-Za-z][\w.-]{0,99})(\s{1,4})(?![-\"'$*])([^\s\"'`,;]+)")
DASHED_QUOTED = re.compile(r"(?<![\w-])(--?[A-Za-z][\w.-]{0,99})(\s{1,4}([\"']))([^\"'\n]+)\3")


@lru_cache(maxsize=10_000)
def names_secret(name: str) -> bool:
    """Return whether a value of this name is a credential: true for `wandb_api_key`, `HF_TOKEN`
    and `--apikey`, false for `max_tokens`, `eos_token` and `tokenizer_path`.

    Of a dotted name the last component counts, and of an environment variable every `..._KEY`.
    """
    leaf = name.strip("-").rpartition(".")[2]
    is_variable = leaf.isupper() and "_" in leaf
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", leaf).lower().replace("-", "_").split("_")
    words = [word for word in words if word and not word.isdigit()]
    if not words or ABOUT.fullmatch(words[-1]):
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if any(STRONG.fullmatch(word) for word in words):
        return True
    if last in ("key", "keys"):
        return is_variable or KEYS.fullmatch(before) is not None
    if last == "token":
        return VOCABULARY.fullmatch(before) is None
    return last == "auth" or (last in ("pwd", "pass") and is_variable and before != "old")


def is_value(text: str) -> bool:
    """Return whether a text may be a secret: no placeholder, reference (`$TOKEN`) or mask."""
    return text.lower() not in NOT_SECRET and not REFERENCE.match(text)


def secret_values(variables: Mapping[str, str]) -> set[str]:
    """Return the values of an environment's credentials that are long enough to be searched for.

    Paths of files that exist, as of `GOOGLE_APPLICATION_CREDENTIALS`, are none.
    """
    return {
        value
        for name in variables  # of the environment: another thread may unset one meanwhile
        if names_secret(name)
        and is_distinctive(value := variables.get(name, ""))
        and not (value[0] == "/" and os.path.exists(value))
    }


def is_distinctive(value: str) -> bool:
    is_word = value.isalpha() and value.islower()
    return SHORTEST_VALUE <= len(value) <= LONGEST_VALUE and is_value(value) and not is_word


class Masker:
    """Masks texts, command lines and trees of options; `count` is the number of masked values.

    Threads may share one.

    Args:
        values: secrets that are masked wherever they occur, such as `secret_values(os.environ)`.
    """

    def __init__(self, values: Iterable[str] = ()) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._search: re.Pattern[str] | None = None  # of the known values; None: to be compiled
        self._clean: set[str] = set()  # texts without a secret: stacks have the same ones many times
        self.learn(values)

    def learn(self, values: Iterable[str]) -> None:
        """Add secrets; plain words and short texts are ignored."""
        new = {value for value in values if is_distinctive(value)}
        with self._lock:
            if not new <= self._known:
                self._known |= new
                self._search = None
                self._clean = set()

    def text(self, text: str) -> str:
        """Return a text with every credential replaced by `***`."""
        clean = self._clean  # that of the secrets which are known now: another thread may learn one
        if not text or text in clean:
            return text
        masked = self._masked(text, is_command=False)
        if masked == text and MASK not in text and len(text) <= LONGEST_CLEAN and len(clean) < MOST_CLEAN:
            clean.add(text)
        return masked

    def document(self, text: str) -> str:
        """Return a JSON text, masked value by value so that it stays JSON; other text as `text`."""
        try:
            return json.dumps(self.tree(json.loads(text)))
        except (ValueError, RecursionError):
            return self.text(text)

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a command line, masked; its secrets are masked in later texts, too."""
        before = ["", *words[:-1]]
        is_secret = [
            follows_secret_option(previous, word) for previous, word in zip(before, words, strict=True)
        ]
        self.learn(word for word, secret in zip(words, is_secret, strict=True) if secret)
        return [
            self._mask(word) if secret else self._masked(word, is_command=True)
            for word, secret in zip(words, is_secret, strict=True)
        ]

    def tree(self, value: Any, name: str = "") -> Any:
        """Return nested dicts and lists with every credential masked, at any depth."""
        self.learn(named_secrets(value, name))
        return self._tree(value, name)

    def _tree(self, value: Any, name: str) -> Any:
        if isinstance(value, dict):
            inner = name if names_secret(name) else ""
            return {key: self._tree(item, inner or str(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._tree(item, name) for item in value]
        if names_secret(name) and not isinstance(value, bool) and value is not None:
            return self._mask(str(value)) if is_value(str(value)) else value
        return self.text(value) if isinstance(value, str) else value

    def _mask(self, secret: str) -> str:
        if len(self._known) < MOST_FOUND:
            self.learn([secret])
        with self._lock:
            self.count += 1
        return MASK

    def _mask_known(self, text: str) -> str:
        with self._lock:
            if self._search is None and self._known:
                forms = self._known | {quote(value, safe="") for value in self._known}
                longest_first = sorted(forms, key=len, reverse=True)
                self._search = re.compile("|".join(re.escape(form) for form in longest_first))
            search = self._search
        return text if search is None else search.sub(lambda found: self._mask(found[0]), text)

    def _masked(self, text: str, is_command: bool) -> str:
        text = PRIVATE_KEY.sub(lambda found: self._mask(found[0]), text)
        text = URL.sub(self._url, text)
        text = HEADER.sub(self._header, text)
        text = PARAMETER.sub(self._parameter, text)
        text = self._assigned(text)
        text = DASHED_QUOTED.sub(self._dashed_quoted, text)
        text = DASHED.sub(lambda found: self._dashed(found, is_command), text)
        text = SHAPES.sub(lambda found: self._mask(found[0]), text)
        text = BEARER.sub(lambda found: found[1] + self._mask(found[2]), text)
        text = WANDB_LOGIN.sub(lambda found: found[1] + self._mask(found[0][len(found[1]) :]), text)
        return self._mask_known(text)

    def _url(self, found: re.Match[str]) -> str:
        scheme = found[1] or found[2] or found[3]
        user, _, password = found[0].removeprefix(scheme)[:-1].partition(":")
        return f"{scheme}{self._mask(password or user)}@"

    def _header(self, found: re.Match[str]) -> str:
        return (found[1] or found[3]) + self._mask((found[2] or found[4]).split()[-1])

    def _parameter(self, found: re.Match[str]) -> str:
        mark, name, value = found.groups()
        if not (PARAMETERS.fullmatch(name) or names_secret(name)) or not is_value(value):
            return found[0]
        return f"{mark}{name}={self._mask(value)}"

    def _assigned(self, text: str) -> str:
        """Mask `NAME=value`. A value may contain another name: `--set=HF_TOKEN=...`."""
        shown, start = [], 0
        while name := ASSIGNED.search(text, start):
            end = name.end()
            found = ASSIGNED_VALUE.match(text, end) if names_secret(name[1]) else None
            shown.append(text[start:end])
            if found is not None and is_assigned_secret(found):
                shown.append((found["quote"] or "") + self._mask(found["quoted"] or found["plain"]))
                end = found.end()
            start = end
        return "".join(shown) + text[start:]

    def _dashed_quoted(self, found: re.Match[str]) -> str:
        if not names_secret(found[1]) or not is_value(found[4]):
            return found[0]
        return f"{found[1]}{found[2]}{self._mask(found[4])}{found[3]}"

    def _dashed(self, found: re.Match[str], is_command: bool) -> str:
        looks_secret = is_command or (len(found[3]) >= SHORTEST_VALUE and not found[3].isalpha())
        if not names_secret(found[1]) or not looks_secret or not is_value(found[3]):
            return found[0]
        return f"{found[1]}{found[2]}{self._mask(found[3])}"


def is_assigned_secret(found: re.Match[str]) -> bool:
    """Return whether what follows `password=` is a value: no call, as in code, no small number."""
    value = found["quoted"] if found["quote"] else found["plain"]
    is_number = value.isdigit() and len(value) < SHORTEST_VALUE
    return is_value(value) and not found["call"] and not is_number


def follows_secret_option(previous: str, word: str) -> bool:
    is_option = word.startswith("--") or (word.startswith("-") and len(word) < SHORTEST_VALUE)
    if previous in ("-u", "--user", "--proxy-user"):  # of curl: NAME:PASSWORD
        return ":" in word and not word.startswith("-")
    names_it = previous.startswith("-") and not re.search(r"[=\s:]", previous) and names_secret(previous)
    return names_it and not is_option and is_value(word)


def named_secrets(value: Any, name: str = "") -> Iterable[str]:
    if isinstance(value, dict):
        inner = name if names_secret(name) else ""
        for key, item in value.items():
            yield from named_secrets(item, inner or str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from named_secrets(item, name)
    elif isinstance(value, str) and names_secret(name):
        yield value


def masker() -> Masker:
    """Return a masker that knows the secrets of this process's environment."""
    return Masker(secret_values(os.environ))


def num_masked(tree: Any) -> int:
    """Return how many values of a stored tree are masked, wholly or in part."""
    if isinstance(tree, dict):
        return sum(num_masked(item) for item in tree.values())
    if isinstance(tree, list):
        return sum(num_masked(item) for item in tree)
    return tree.count(MASK) if isinstance(tree, str) else 0
