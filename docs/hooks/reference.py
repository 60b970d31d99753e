"""Add the reference pages to the documentation site, made from the code at each build.

Texts of causes and findings are the arguments of their `Finding`, `Alarm` or `alarm_of` calls. They
are read from the source, which needs no torch; what is known only in a run is shown as `…`.
"""

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
API = (
    "recorder.open_record",
    "recorder.Record",
    "recorder.RecordedStep",
    "areal_debug.Recorder",
    "areal_debug.Sample",
    "areal_debug.watch",
    "areal_debug.wiring.wire",
    "areal_debug.trl.record",
    "areal_debug.trl.replay",
    "areal_debug.verl.record_step",
    "areal_debug.areal.Recorded",
    "areal_debug.areal.Replayed",
    "areal_debug.nemo_rl.Recorded",
    "areal_debug.skyrl.Record",
    "areal_debug.pytest_plugin.replay_record",
    "areal_core.RemoteEngine",
    "areal_core.agent.EpisodeFailed",
    "areal_core.config.GRPOConfig",
    "areal_core.config.load_expr_config",
    "areal_core.data.get_dataset",
    "areal_core.reward.arithmetic_reward_fn",
    "areal_core.reward.no_reward",
    "areal_core.rollout.types.ModelRequest",
    "areal_core.rollout.types.sampling_from",
    "areal_core.rollout.workflow.RLVRWorkflow",
    "areal_core.rollout.workflow.RolloutWorkflow",
    "areal_core.rollout.workflow.episode_tensors",
    "areal_core.rollout.workflow.prompt_tokens",
    "areal_core.telemetry.in_episode.scalar",
    "areal_core.telemetry.in_episode.trace_scope",
    "areal_core.telemetry.in_episode.traced",
    "areal_core.trainer.rl.PPOTrainer",
)
# Position of each text in the arguments of the call that makes a finding.
TEXTS = {
    "Finding": {"Reported as": 1, "What would refute it": 4, "What to do": 5},
    "Alarm": {"Reported as": 1, "What to do": 6, "To confirm": 7, "Source": 8},
    "alarm_of": {"Reported as": 1, "What to do": 5, "To confirm": 6, "Source": 7},
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add one generated file for each page."""
    for name, page in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=page()))
    return files


def escaped(text: str) -> str:
    """Return text whose marks Markdown and HTML do not read, except those of `code`."""
    marks = r"(?P<code>`[^`\n]+`)|[\\`*_{}\[\]<>|#~^$&]"
    return re.sub(marks, lambda mark: mark["code"] or f"&#{ord(mark[0])};", text)


def entry(anchor: str, title: str, *paragraphs: str) -> str:
    """Return a section with a stable anchor."""
    return "\n\n".join([f"## {title} {{ #{anchor} }}", *filter(None, paragraphs)]) + "\n\n"


def options() -> str:
    """Every option of every kind of trainer."""
    from areal_debug.info.options import KINDS, facts_line, options_of

    text = "# Options\n\nThe same list in a terminal: `areal-debug info options --kind KIND`.\n\n"
    for kind, cls in KINDS.items():
        if kind == "ppo":  # the class of grpo
            continue
        text += f"## {kind}{' and ppo' if kind == 'grpo' else ''} {{ #{kind} }}\n\n"
        for option in options_of(cls):
            anchor = f"{{ #{kind}-{option.name.replace('.', '-')} }}"
            if option.is_section and "." not in option.name:
                text += f"### `{option.name}` {anchor}\n\n{escaped(option.help)}\n\n"
            else:
                text += f"`{facts_line(option)}`{anchor}\n\n:   {escaped(option.help)}\n\n"
    return text


def verbs(command: click.Command, context: click.Context) -> Iterator[click.Context]:
    """Yield the context of a command and of all commands below it."""
    yield context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from verbs(below, click.Context(below, context, info_name=name, terminal_width=100))


def cli() -> str:
    """Every verb with its help, which has usage, options, defaults, exit codes and an example."""
    from areal_debug.cli import main

    text = "# Commands\n\n"
    for context in verbs(main, click.Context(main, info_name="areal-debug", terminal_width=100)):
        name = context.command_path
        text += entry(name.replace(" ", "-"), f"`{name}`", f"```text\n{context.get_help()}\n```")
    return text


def labels() -> str:
    """Every label of a hang, as `areal-debug hang explain LABEL` prints it."""
    from hangdoctor.rules.order import RULES

    text = "# Labels of hangs\n\nIn a terminal: `areal-debug hang explain LABEL`.\n\n"
    for rule in RULES:
        module, label = rule.__name__, rule.__name__.rpartition(".")[2]
        calls = [node for node in ast.walk(source_of(module)[1]) if isinstance(node, ast.Call)]
        names = [(call.func.id if isinstance(call.func, ast.Name) else "", call.args) for call in calls]
        steps = [[text_of(arg, module) for arg in args] for name, args in names if name == "step"]
        refuted = [args[6] for name, args in names if name in ("Verdict", "source_verdict")]
        text += entry(
            label,
            f"`{label}`",
            escaped(inspect.getdoc(rule) or ""),
            listed("What to do", (f"`{do}`: {why}{cost_of(*cost)}" for do, why, *cost in steps)),
            listed("What would refute it", (one for arg in refuted for one in texts_of(arg, module))),
        )
    return text


def cost_of(cost: str = "") -> str:
    """Return what a step costs, in words that follow the step."""
    return f" (cost: {cost})" if cost else ""


@cache
def source_of(module: str) -> tuple[str, ast.Module]:
    """Return the text of one of our modules and its tree, both empty for any other module."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = file.read_text() if file.is_file() else ""
    return text, ast.parse(text)


def constant(name: str, module: str) -> tuple[ast.expr, str] | None:
    """Return the value of a name of a module, and the module that assigns it; None if none does."""
    for node in source_of(module)[1].body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                return value, module
            case ast.AnnAssign(target=ast.Name(id=found), value=ast.expr() as value) if found == name:
                return value, module
            case ast.ImportFrom(module=str(origin), names=aliases):
                if any((alias.asname or alias.name) == name for alias in aliases):
                    return constant(name, origin)
    return None


def resolved(node: ast.expr, module: str) -> tuple[ast.expr, str]:
    """Return what a name stands for, or the node itself."""
    found = constant(node.id, module) if isinstance(node, ast.Name) else None
    return found or (node, module)


def text_of(node: ast.expr, module: str) -> str:
    """Return an argument as text, with `…` for what only a run knows."""
    node, module = resolved(node, module)
    match node:
        case ast.Constant(value=str() | int() | float() as value):
            return str(value)
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part, module) for part in parts)
        case ast.FormattedValue(value=value, format_spec=spec):
            shown, _ = resolved(value, module)
            if isinstance(shown, ast.Constant) and spec is not None:
                return format(shown.value, text_of(spec, module))
            return text_of(value, module)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return text_of(left, module) + text_of(right, module)
        case ast.IfExp(body=body, orelse=other):
            return f"{text_of(body, module)} / {text_of(other, module)}"
    return "…"


def texts_of(node: ast.expr, module: str) -> list[str]:
    """Return the items of an argument that is a tuple of texts, or its one text."""
    node, module = resolved(node, module)
    match node:
        case ast.Tuple(elts=parts):
            return [text for part in parts for text in texts_of(part, module)]
        case ast.Starred(value=value):
            return texts_of(value, module)
        case ast.Subscript(value=value, slice=ast.Slice()):
            return texts_of(value, module)
        case ast.BinOp(op=ast.Add(), left=left, right=right) if any(
            isinstance(resolved(side, module)[0], ast.Tuple | ast.IfExp) for side in (left, right)
        ):
            return texts_of(left, module) + texts_of(right, module)
        case ast.IfExp(body=body, orelse=other) if isinstance(body, ast.Tuple):
            return texts_of(body, module) + texts_of(other, module)
    return [text_of(node, module)]


def listed(title: str, items: Iterable[str]) -> str:
    """Return titled items, a list if there are several, without what is only known in a run."""
    lines = [escaped(item) for item in dict.fromkeys(items) if item.strip(" …/")]
    if len(lines) < 2:
        return f"**{title}**: {lines[0]}" if lines else ""
    return "\n".join([f"**{title}**", "", *(f"- {line}" for line in lines)])


def call_texts(tree: ast.AST, module: str) -> Iterator[str]:
    """Yield the lists of texts that the calls of `TEXTS` in a tree are given."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in TEXTS:
            for title, at in TEXTS[call.func.id].items():
                if at < len(call.args):
                    yield listed(title, texts_of(call.args[at], module))


def limits_in(function: ast.FunctionDef, module: str) -> str:
    """Return the numbers that a rule compares with, as their modules define and explain them."""
    lines = []
    for node in ast.walk(function):
        found = constant(node.id, module) if isinstance(node, ast.Name) and node.id.isupper() else None
        if found and isinstance(found[0], ast.Constant) and isinstance(found[0].value, int | float):
            lines.append(f"`{source_of(found[1])[0].splitlines()[found[0].lineno - 1]}`")
    return listed("Limits", sorted(set(lines)))


def rules_in(package: str, pattern: str) -> Iterator[tuple[str, str]]:
    """Yield id and text of each rule whose docstring begins with one or several ids."""
    for file in sorted((ROOT / package.replace(".", "/")).glob("*.py")):
        module = f"{package}.{file.stem}"
        for function in source_of(module)[1].body:
            doc = ast.get_docstring(function) if isinstance(function, ast.FunctionDef) else None
            match = re.match(rf"({pattern}(?:, {pattern})*): ", doc or "")
            if isinstance(function, ast.FunctionDef) and doc and match:
                first, _, more = doc[match.end() :].partition("\n\n")
                texts = [
                    f"**{escaped(first[:1].upper() + first[1:])}**",
                    escaped(more),
                    *call_texts(function, module),
                ]
                texts.append(limits_in(function, module))
                for id in match[1].split(", "):
                    yield id, "\n\n".join(dict.fromkeys(filter(None, texts)))


def rules_page(title: str, rules: Iterator[tuple[str, str]]) -> str:
    """Return a page with one entry for each id, of all rules that report it."""
    by_id: dict[str, list[str]] = {}
    for id, text in rules:
        by_id.setdefault(id, []).append(text)
    return f"# {title}\n\n" + "".join(entry(id.lower(), id, *by_id[id]) for id in sorted(by_id))


def causes() -> str:
    """Every cause that `areal-debug consistency` reports."""
    from consistency.causes import CAUSES

    def rows() -> Iterator[tuple[str, str]]:
        for key, row in CAUSES.items():
            texts = [f"**{escaped(row.name)}**", escaped(row.evidence)]
            texts += [listed("Would refute it", [row.refute]), listed("Fix", [row.fix])]
            yield key.partition(".")[0], "\n\n".join(filter(None, texts))

    return rules_page("Causes of a mismatch", rows())


def findings() -> str:
    """Every finding of `areal-debug doctor`: D of metrics, S of the samples of a record."""

    from areal_debug.doctor.alarm import findings as rows

    text = "# Findings of doctor\n\n"
    for id, row in sorted(rows().items()):
        of_variants = [variant["title"] for variant in row.get("variants", {}).values()]
        titles = of_variants or list(row.get("titles", {}).values()) or [row["title"]]
        quantity = row.get("quantity")
        text += entry(
            id.lower(),
            id,
            "\n\n".join(f"**{escaped(title[:1].upper() + title[1:])}**" for title in titles),
            f"Metric: [`{quantity}`](metrics.md#{quantity}); limit: {escaped(row['limit'])}"
            if quantity
            else "",
            listed("What to do", row.get("advice", ())),
            listed("To confirm", [row.get("experiment", "")]),
            listed("Source", [row.get("source", "")]),
        )
    return text


def metrics() -> str:
    """Every quantity that doctor judges, with the names under which frameworks log it."""
    from areal_debug.doctor.names import QUANTITIES

    text = "# Metrics\n\nQuantities that `areal-debug doctor` judges, and their names in logs.\n\n"
    for quantity, row in QUANTITIES.items():
        logged = ", ".join(f"`{name}`" for name in row["names"])
        paragraphs = (escaped(row["meaning"]), f"**Unit**: {row['unit']}", f"**Logged as**: {logged}")
        text += entry(quantity, f"`{quantity}`", *paragraphs)
    return text


def probes() -> str:
    """Every kind of answers that `areal-debug reward probe` tries."""
    from areal_debug.reward.answers import FORMATS, KINDS

    text = "# Answers of reward probe\n\nFormats: " + ", ".join(f"`{name}`" for name in FORMATS) + ".\n\n"
    for kind in KINDS:
        limit = (
            "must not be paid" if kind.expected == "wrong" else "must not be paid more than other right ones"
        )
        needs = "; needs rows with an expected answer" if kind.needs_gold else ""
        text += entry(
            re.sub(r"\W+", "-", kind.name), kind.name.capitalize(), f"These answers {limit}{needs}."
        )
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
    "probes": probes,
    "format": record_format,
    "api": api,
}
