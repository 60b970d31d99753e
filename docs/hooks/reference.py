"""Add the reference pages to the documentation site, made from the code at each build.

Texts of causes and findings are the arguments of their `Finding`, `Alarm` or `alarm_of` calls: a
value that is known only in a run is shown as `…`.
"""

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
API = (
    "recorder.reader.open_record",
    "recorder.reader.Record",
    "recorder.trainers.recorder.Recorder",
    "areal_debug.watching.block.watch",
    "areal_debug.trl.recording.record",
    "areal_debug.trl.replaying.replay",
    "areal_debug.pytest_plugin.replay_record",
)
# Position of each text in the arguments of the call that makes a finding.
TEXTS = {
    "Finding": {"Name": 1, "What would refute it": 4, "What to do": 5},
    "Alarm": {"Name": 1, "What to do": 6, "To confirm": 7, "Source": 8},
    "alarm_of": {"Name": 1, "What to do": 5, "To confirm": 6, "Source": 7},
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add one generated file for each page."""
    for name, page in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=page()))
    return files


def escaped(text: str) -> str:
    """Return text without characters that Markdown or HTML would read as marks."""
    return re.sub(r"[\\`*_{}\[\]<>|#~^$&]", lambda mark: f"&#{ord(mark[0])};", text)


def entry(anchor: str, title: str, *paragraphs: str) -> str:
    """Return a section with a stable anchor."""
    return "\n\n".join([f"## {title} {{ #{anchor} }}", *filter(None, paragraphs)]) + "\n\n"


def options() -> str:
    """Every option of every kind of trainer."""
    from areal_debug.config.options import KINDS, options_of
    from areal_debug.config.render import facts_line

    text = "# Options\n\nThe same list in a terminal: `areal-debug config --kind KIND`.\n\n"
    for kind, cls in KINDS.items():
        if kind == "ppo":  # the class of grpo
            continue
        text += f"## {kind}{' and ppo' if kind == 'grpo' else ''} {{ #{kind} }}\n\n"
        for option in options_of(cls):
            anchor = f"{kind}-{option.name.replace('.', '-')}"
            rest = facts_line(option).removeprefix(option.name)
            text += f"**`{option.name}`**{{ #{anchor} }}{escaped(rest)}\n\n:   {escaped(option.help)}\n\n"
    return text


def verbs(command: click.Command, context: click.Context) -> Iterator[click.Context]:
    """Yield the context of a command and of all commands below it."""
    yield context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from verbs(below, click.Context(below, context, info_name=name, max_content_width=100))


def cli() -> str:
    """Every verb with its help, which has usage, options, defaults, exit codes and an example."""
    from areal_debug.cli import main

    text = "# Commands\n\n"
    for context in verbs(main, click.Context(main, info_name="areal-debug", max_content_width=100)):
        name = context.command_path
        text += entry(name.replace(" ", "-"), f"`{name}`", f"```text\n{context.get_help()}\n```")
    return text


def labels() -> str:
    """Every label of a hang, as `areal-debug hang explain LABEL` prints it."""
    from hangdoctor.rules.order import RULES

    text = "# Labels of hangs\n\nIn a terminal: `areal-debug hang explain LABEL`.\n\n"
    for rule in RULES:
        name = rule.__name__.rpartition(".")[2]
        refuted = [f"- {escaped(one)}" for one in getattr(rule, "REFUTE", ())]
        steps = [f"- `{one.do}`: {escaped(one.why)}" for one in getattr(rule, "STEPS", ())]
        text += entry(
            name,
            f"`{name}`",
            escaped(inspect.getdoc(rule) or ""),
            "**What to do**\n\n" + "\n".join(steps) if steps else "",
            "**What would refute it**\n\n" + "\n".join(refuted) if refuted else "",
        )
    return text


def text_of(node: ast.expr, module: ModuleType) -> str:
    """Return an argument as text, with `…` for what only a run knows."""
    try:  # constants of the module
        value = eval(compile(ast.Expression(node), "<reference>", "eval"), dict(vars(module)))
        return "; ".join(value) if isinstance(value, tuple) else str(value)
    except Exception:  # a name that is local to the rule
        pass
    match node:
        case ast.JoinedStr():
            return "".join(text_of(part, module) for part in node.values)
        case ast.FormattedValue():
            return text_of(node.value, module)
        case ast.BinOp():
            return text_of(node.left, module) + text_of(node.right, module)
        case ast.IfExp():
            return f"{text_of(node.body, module)} / {text_of(node.orelse, module)}"
        case ast.Tuple():
            return "; ".join(text_of(part, module) for part in node.elts)
    return "…"


def rules_in(package: str, pattern: str) -> Iterator[tuple[str, str]]:
    """Yield id and text of each rule whose docstring begins with one or several ids."""
    folder = import_module(package)
    for found in pkgutil.iter_modules(folder.__path__, f"{package}."):
        module = import_module(found.name)
        for function in ast.parse(inspect.getsource(module)).body:
            doc = ast.get_docstring(function) if isinstance(function, ast.FunctionDef) else None
            match = re.match(rf"({pattern}(?:, {pattern})*): ", doc or "")
            if doc and match:
                texts = [f"**{escaped(doc[match.end() :])}**", *call_texts(function, module)]
                for id in match[1].split(", "):
                    yield id, "\n\n".join(texts)


def call_texts(function: ast.AST, module: ModuleType) -> Iterator[str]:
    """Yield the texts of the findings that a rule makes."""
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in TEXTS:
            for title, at in TEXTS[call.func.id].items():
                if at < len(call.args) and (text := text_of(call.args[at], module)) != "…":
                    yield f"{title}: {escaped(text)}"


def rules_page(title: str, rules: Iterator[tuple[str, str]]) -> str:
    """Return a page with one entry for each id, of all rules that report it."""
    by_id: dict[str, list[str]] = {}
    for id, text in rules:
        by_id.setdefault(id, []).append(text)
    return f"# {title}\n\n" + "".join(entry(id.lower(), id, *by_id[id]) for id in sorted(by_id))


def causes() -> str:
    """Every cause that `areal-debug consistency` reports."""
    return rules_page("Causes of a mismatch", rules_in("consistency.causes", r"R\d\d"))


def thresholds() -> Iterator[tuple[str, str]]:
    """Yield id and text of each finding that is a limit on one metric."""
    from areal_debug.doctor.rules.thresholds import THRESHOLDS

    for one in THRESHOLDS:
        lines: dict[str, Any] = {"Metric": one.quantity, "Limit": one.limit}
        lines |= {"What to do": "; ".join(one.advice), "To confirm": one.experiment, "Source": one.source}
        yield (
            one.id,
            "\n\n".join([f"**{escaped(one.title)}**", *(f"{k}: {escaped(v)}" for k, v in lines.items())]),
        )


def findings() -> str:
    """Every finding of `areal-debug doctor`: D of metrics, S of the samples of a record."""

    def all_rules() -> Iterator[tuple[str, str]]:
        yield from rules_in("areal_debug.doctor.rules", r"D\d\d")
        yield from thresholds()
        yield from rules_in("areal_debug.doctor.samples", r"S\d\d")

    return rules_page("Findings of doctor", all_rules())


def metrics() -> str:
    """Every quantity that doctor judges, with the names under which frameworks log it."""
    from areal_debug.doctor.names import NAMES

    text = "# Metrics\n\nQuantities that `areal-debug doctor` judges, and their names in logs.\n\n"
    for quantity, names in NAMES.items():
        text += entry(quantity, f"`{quantity}`", ", ".join(f"`{name}`" for name in names))
    return text


def record_format() -> str:
    """The specification of the record format."""
    return (ROOT / "recorder/FORMAT.md").read_text()


def api() -> str:
    """The public Python names, by mkdocstrings."""
    return "# Python API\n\n" + "".join(f"::: {name}\n\n" for name in API)


PAGES = {
    "options": options,
    "cli": cli,
    "labels": labels,
    "causes": causes,
    "findings": findings,
    "metrics": metrics,
    "format": record_format,
    "api": api,
}
