"""`areal-debug`: the table of verbs, and the options that they share.

Each verb is a file of `areal_debug/verbs/`, imported only when that verb runs.
"""

import difflib
import importlib
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from areal_core.environment import ALLOWED_CODE
from areal_core.safety.private import keep_files_private
from areal_debug.start_up import cache_bytecode, collect_garbage_rarely, say_when_time_is_up
from areal_debug.streams import INTERRUPTED, guarded

SECTIONS = tomllib.loads(Path(__file__).with_name("verbs.toml").read_text(encoding="utf-8"))
EARLIER = SECTIONS.pop("earlier")
READS = {"hang": "diagnose", "record": "show"}  # the command of a verb that reads a path
VERBS = {name: help for section in SECTIONS.values() for name, help in section.items()}

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
USUAL_UMASK = "areal_debug.umask"  # key in a context's meta: of the user, for jobs that are theirs

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def revisions_joined(words: list[str]) -> list[str]:
    """Return the arguments of the older `bisect` for `why --commits`: GOOD..BAD first."""
    revisions, rest = {"--good": "", "--bad": "HEAD"}, []
    left = iter(words)
    for word in left:
        name, has_value, value = word.partition("=")
        if name in revisions:
            revisions[name] = value if has_value else next(left, "")
        else:
            rest.append(word.replace("--from-step", "--step"))
    return ["..".join(revisions.values()), *rest]


def set_verbosity(context: click.Context, option: click.Parameter, given: bool) -> None:
    """Remember --quiet or --verbose for `areal_debug.render`."""
    from areal_debug.render import VERBOSITY

    if given and context.meta.setdefault(VERBOSITY, option.name) != option.name:
        raise click.UsageError("--quiet and --verbose exclude each other: choose one")


def verbosity_options() -> list[click.Parameter]:
    helps = {
        "quiet": "Print only the verdict, one line, and errors.",
        "verbose": "Also print progress to logs, and the traceback of an error.",
    }
    return [
        click.Option(
            [f"-{name[0]}", f"--{name}"], is_flag=True, expose_value=False, callback=set_verbosity, help=help
        )
        for name, help in helps.items()
    ]


def write_example(example: str, formatter: click.HelpFormatter) -> None:
    """Write the example below the options; command lines are never wrapped."""
    formatter.write("\nExample:\n" + "".join(f"  {line}\n" for line in example.splitlines()))


class Verb(click.Command):
    """A command with `-h`, `-q` and `-v`, an example in its help, progress, and errors as sentences."""

    def __init__(
        self,
        name: str | None,
        *,
        example: str,
        callback: Callable[..., Any],
        context_settings: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        from areal_debug.render import errors_as_sentences

        context_settings = {**SETTINGS, **(context_settings or {})}
        super().__init__(
            name, callback=errors_as_sentences(callback), context_settings=context_settings, **settings
        )
        self.params += verbosity_options()
        self.example = example

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = args[: args.index("--")] if "--" in args else list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            hidden = {name for one in self.params if getattr(one, "hidden", False) for name in one.opts}
            shown = [name for name in error.possibilities or () if name not in hidden]
            raise click.NoSuchOption(error.option_name, possibilities=shown, ctx=ctx) from None
        for parameter in self.params:
            if isinstance(parameter, click.Argument) and parameter.type is click.UNPROCESSED:
                passed_on = ctx.params[parameter.name or ""] or ()
                # of a command that follows, such as a job to watch, only the first word is ours
                words = passed_on if ctx.allow_interspersed_args else passed_on[:1]
                self.refuse_misspelled(ctx, [word for word in words if word in given])
        return rest

    def refuse_misspelled(self, ctx: click.Context, words: Iterable[str]) -> None:
        known = [name for option in self.params for name in option.opts if name.startswith("--")]
        for word in words:
            name = word.partition("=")[0]
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            if name.startswith("--") and close and name not in known:
                ctx.fail(f"there is no option {name}: did you mean {close[0]}?")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_example(self.example, formatter)


class VerbGroup(click.Group):
    """A group that imports a verb when it is called, and suggests verbs for a misspelled one.

    Args:
        lazy: `module:attribute` below `areal_debug` of verbs that are defined in other files.
        sections: titles and one-line helps of verbs, so that `--help` imports none of them; without
            it the verbs' own `short_help`.
    """

    def __init__(
        self,
        name: str | None,
        *,
        example: str,
        lazy: Mapping[str, str] | None = None,
        sections: Mapping[str, Mapping[str, str]] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(name, context_settings=SETTINGS, **settings)
        self.example, self.lazy, self.sections = example, lazy or {}, sections or {}
        if self.invoke_without_command and self.callback is not None:
            from areal_debug.render import errors_as_sentences

            self.callback = errors_as_sentences(self.callback)
            self.params += verbosity_options()

    def main(self, *args: Any, **settings: Any) -> Any:
        cache_bytecode()
        collect_garbage_rarely()
        say_when_time_is_up()
        return guarded(lambda: super(VerbGroup, self).main(*args, **settings))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *self.lazy]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self.lazy[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(f"areal_debug.{module}"), attribute)
        command.short_help = command.short_help or VERBS.get(cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.sections and args[0] in EARLIER["aliases"] and not ctx.resilient_parsing:
            now, rest = EARLIER["aliases"][args[0]], args[1:]
            click.echo(f"areal-debug {args[0]} is now: areal-debug {' '.join(now)}", err=True)
            if args[0] == "bisect":
                rest = revisions_joined(rest)
            elif args[0] == "bisect-step":
                rest = [word for word in rest if word != "--layers"] + ["--no-replay"] * (
                    "--layers" not in rest
                )
            args = [*now, *rest]
        name, known = args[0], self.list_commands(ctx)
        if self.sections and name in EARLIER["gone"]:
            ctx.fail(f"there is no command {name!r} any more: {EARLIER['gone'][name]}")
        if name not in known and not name.startswith("-") and not ctx.resilient_parsing:
            close = difflib.get_close_matches(name, known, n=2)
            hint = f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(known)}"
            if (reads := READS.get(ctx.info_name or "")) and Path(name).exists():
                hint = f"to read that path, areal-debug {ctx.info_name} {reads} {name}"
            ctx.fail(f"there is no command {name!r}: {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        helps = {name: command.short_help or "" for name, command in commands.items() if command is not None}
        sections = self.sections or {"Commands": helps}
        width = max(len(name) for verbs in sections.values() for name in verbs)
        for title, verbs in sections.items():
            lines = (f"  {name:<{width}}  {help}\n" for name, help in verbs.items())
            formatter.write(f"\n{title}:\n" + "".join(lines))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_example(self.example, formatter)
        if self.sections:
            completion = 'eval "$(_AREAL_DEBUG_COMPLETE=bash_source areal-debug)"'
            formatter.write(
                f"\nShell completion (zsh_source for zsh, fish_source for fish):\n  {completion}\n"
            )


@click.group(
    cls=VerbGroup,
    example="areal-debug train examples/gsm8k_grpo.py --dump-rollout runs/record\nareal-debug replay runs/record",
    lazy={name: f"verbs.{name.replace('-', '_')}:command" for name in VERBS},
    sections=SECTIONS,
)
@click.version_option(package_name="areal-debug", prog_name="areal-debug")
def main() -> None:
    """Record, replay and diagnose reinforcement learning of language models.

    Exit codes of every verb: 0 healthy, 1 a problem was found, 2 inconclusive or misuse, 130
    interrupted, 141 the reader of its output has ended.
    """
    from areal_debug.installation import check_packages

    try:
        check_packages()
    except ImportError as error:
        raise click.UsageError(str(error)) from None
    # what verbs write has prompts, completions and configs in it
    click.get_current_context().meta[USUAL_UMASK] = keep_files_private()


json_option = click.option("--json", "as_json", is_flag=True, help="Print the same facts as JSON.")
skip_damaged_option = click.option(
    "--skip-damaged", is_flag=True, help="Leave out what is damaged, and name it; exit code 1 if anything is."
)
sample_option = click.option(
    "--sample",
    is_flag=True,
    help="Read the sample of this package, which is unpacked into ./areal-debug-sample.",
)
force_option = click.option("--force", is_flag=True, help="Replace an existing output.")
model_option = click.option(
    "--model", type=click.Path(), help="Model that the run started from, if it was moved since."
)


def allow_code(context: click.Context, option: click.Parameter, paths: tuple[str, ...]) -> None:
    """Let the replays of this command import own code from these paths."""
    if paths:
        before = os.environ.get(ALLOWED_CODE)
        os.environ[ALLOWED_CODE] = os.pathsep.join(map(os.path.abspath, paths))
        context.call_on_close(lambda: restore(before))


def restore(value: str | None) -> None:
    if value is None:
        os.environ.pop(ALLOWED_CODE, None)
    else:
        os.environ[ALLOWED_CODE] = value


code_option = click.option(
    "--code",
    multiple=True,
    type=click.Path(exists=True),
    metavar="PATH",
    expose_value=False,
    callback=allow_code,
    help="File or folder with the loss, advantage or objective of the run, if it had its own. May be repeated.",
)
script_argument = click.argument("script", type=click.Path())
script_config_option = click.option(
    "--config", "config_file", type=click.Path(), help="YAML file; by default SCRIPT's name with .yaml."
)
overrides_argument = click.argument(
    "overrides", nargs=-1, type=click.UNPROCESSED, metavar="[OPTION=VALUE]..."
)
nproc_option = click.option(
    "--nproc", type=click.IntRange(min=1), help="Number of ranks; by default as configured or recorded."
)


def step_option(default: str, **settings: Any) -> Decorator:
    """`--step N`: the number of a recorded step."""
    return click.option(
        "--step", type=int, metavar="N", help=f"Number of the step; by default {default}.", **settings
    )


def output_option(help: str, spellings: tuple[str, ...] = (), **settings: Any) -> Decorator:
    """`-o`, `--output`, or one of `spellings`: the file or folder that a verb writes."""
    path = click.Path(path_type=Path)
    return click.option(
        "-o", "--output", *spellings, "output", type=path, metavar="PATH", help=help, **settings
    )
