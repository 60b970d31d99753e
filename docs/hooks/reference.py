"""Add the reference pages to the documentation site, made from the code at each build.

Texts of causes and findings are the arguments of their `Finding`, `Alarm` or `alarm_of` calls. They
are read from the source, which needs no torch; what is known only in a run is shown as `…`.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator
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
    "areal_debug.trl.layouts",
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
    "areal_core.errors.RewardError",
    "areal_core.reward.arithmetic_reward_fn",
    "areal_core.reward.no_reward",
    "areal_core.reward.served.post_json",
    "areal_core.rollout.types.ModelRequest",
    "areal_core.rollout.types.sampling_from",
    "areal_core.rollout.workflow.RLVRWorkflow",
    "areal_core.rollout.workflow.RolloutWorkflow",
    "areal_core.rollout.workflow.episode_tensors",
    "areal_core.rollout.workflow.prompt_tokens",
    "areal_core.telemetry.in_episode.scalar",
    "areal_core.telemetry.in_episode.trace_scope",
    "areal_core.telemetry.in_episode.traced",
    "areal_core.testing.make_tiny_model",
    "areal_core.trainer.rl.PPOTrainer",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add one generated file for each page, in place of the page that a checkout has for all."""
    if (of_checkout := files.get_file_from_path("reference.md")) is not None:
        files.remove(of_checkout)
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
    from hangdoctor.rules.verdict import LABELS

    text = "# Labels of hangs\n\nIn a terminal: `areal-debug hang explain LABEL`.\n\n"
    for label, row in LABELS.items():
        kinds = [row, *(variant for variant in row.values() if isinstance(variant, dict))]
        steps = [one for kind in kinds for one in kind.get("steps", ())]
        refuted = [one for kind in kinds for one in kind.get("refute", ())]
        text += entry(
            label,
            f"`{label}`",
            escaped(row["about"].strip()),
            listed("What to do", (f"`{o['do']}`: {o['why']}{cost_of(o.get('cost', ''))}" for o in steps)),
            listed("What would refute it", refuted),
        )
    return text


def cost_of(cost: str = "") -> str:
    """Return what a step costs, in words that follow the step."""
    return f" (cost: {cost})" if cost else ""


def listed(title: str, items: Iterable[str]) -> str:
    """Return titled items, a list if there are several, without what is only known in a run."""
    lines = [escaped(item) for item in dict.fromkeys(items) if item.strip(" …/")]
    if len(lines) < 2:
        return f"**{title}**: {lines[0]}" if lines else ""
    return "\n".join([f"**{title}**", "", *(f"- {line}" for line in lines)])


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
        of_variants = [one["title"] for one in row.get("variants", {}).values() if "title" in one]
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


def calm_answers() -> str:
    """Every answer that says all is well, and what it rests on."""
    rows = tomllib.loads((ROOT / "areal_debug/report/calm.toml").read_text())
    text = (
        "# What an all-clear rests on\n\nA verb says that all is well, with exit code 0, only if it has "
        "observed what is listed here. A test takes each observation away.\n\n"
    )
    for verb, row in rows.items():
        needs = listed("It needs", row["needs"].values())
        text += entry(re.sub(r"\W+", "-", verb), f"`{verb}`: \u201c{row['says']}\u201d", needs)
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
    "calm": calm_answers,
    "format": record_format,
    "api": api,
}
