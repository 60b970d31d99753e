"""The vocabulary: standard terms of the field in code, comments, messages and documents."""

import ast
import io
import re
import subprocess
import tokenize
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("areal_core", "recorder", "replayer", "consistency", "hangdoctor", "areal_debug")
LONGEST_LINE_OF_PROSE = 100
BANNED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
OF_OTHERS = {"uplot.js"}
PATTERN = re.compile("|".join(f"(?:{pattern})" for pattern in BANNED), re.IGNORECASE)


def tracked(*endings: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if name.endswith(endings)]


def texts_of(file: Path) -> list[tuple[int, str]]:
    """Return line numbers and texts for a reader: of Python files, strings and comments.

    Comments, which are slow to find, only of a file with a banned word.
    """
    text = file.read_text()
    if file.suffix != ".py":  # quoted code, such as a former name, is no prose, nor is a class
        code = r"`[^`]*`|\bPromise\b" if file.suffix == ".js" else r"`[^`]*`"
        return [(n, re.sub(code, "", line)) for n, line in enumerate(text.splitlines(), 1)]
    if PATTERN.search(re.sub(r"[\s\"'\\#]+", " ", text)) is None:  # a phrase may be in two strings
        return []
    strings = [
        (node.lineno, node.value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    if PATTERN.search(text) is None:  # a comment is in the file as it is, a string may have escapes
        return strings
    return strings + [(t.start[0], t.string) for t in comments(text)]


def comments(text: str) -> list[tokenize.TokenInfo]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token for token in tokens if token.type == tokenize.COMMENT]


def banned_words(texts: list[tuple[int, str]]) -> list[str]:
    return [f"{line}: {match[0]}" for line, text in texts for match in PATTERN.finditer(text)]


def prose_files() -> list[Path]:
    """Everything but tests: their names and inputs quote what users and other tools write."""
    python = [f for f in tracked(".py") if f.relative_to(ROOT).parts[0] in (*PACKAGES, "examples")]
    documents = [f for f in tracked(".md", ".html", ".js") if f.relative_to(ROOT).parts[0] != "tests"]
    return python + [file for file in documents if file.name not in OF_OTHERS]


def test_only_standard_terms_are_used():
    found = {str(f.relative_to(ROOT)): words for f in prose_files() if (words := banned_words(texts_of(f)))}
    assert found == {}


def test_architecture_fits_in_300_lines_of_100_columns():
    lines = (ROOT / "ARCHITECTURE.md").read_text().splitlines()
    assert len(lines) <= 300
    assert max(map(len, lines)) <= LONGEST_LINE_OF_PROSE
