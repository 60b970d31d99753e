"""The tools of the server: rows of `tools.toml`, from a question to the command that answers it.

The table is all that an agent can ask: there is no tool for an option that no row names.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from areal_debug.mcp.roots import BadCall, Roots

Kind = Literal["path", "string", "integer", "boolean"]
TYPES: Mapping[Kind, tuple[str, type]] = {
    "path": ("string", str),
    "string": ("string", str),
    "integer": ("integer", int),
    "boolean": ("boolean", bool),
}


@dataclass(frozen=True)
class Argument:
    """An argument of a tool; the fields are those of a row."""

    name: str
    about: str
    kind: Kind = "string"
    option: str = ""
    several: bool = False
    required: bool = False
    absent: tuple[str, ...] = ()
    runs: bool = False

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the value."""
        one = {"type": TYPES[self.kind][0]}
        several = {"type": "array", "items": one, "minItems": 1}
        return {**(several if self.several else one), "description": self.about}

    def words(self, value: Any, roots: Roots) -> tuple[list[str], list[str]]:
        """Return the options and the positional words of a value. Raises BadCall."""
        name, kind = TYPES[self.kind]
        values = value if self.several and isinstance(value, list) and value else [value]
        for one in values:
            if not isinstance(one, kind) or (kind is int and isinstance(one, bool)):
                expected = f"a list of {name}s" if self.several else name
                raise BadCall(f"{self.name} is {str(value)[:80]!r}: expected {expected}")
        if self.kind == "boolean":
            return ([self.option] if self.option else []), []
        words = [roots.resolve(self.name, one) if self.kind == "path" else str(one) for one in values]
        return ([f"{self.option}={word}" for word in words], []) if self.option else ([], words)


@dataclass(frozen=True)
class Tool:
    """A question; without a verb, no command is needed."""

    name: str
    about: str
    arguments: tuple[Argument, ...]
    verb: tuple[str, ...] = ()
    runs: bool = False
    imports: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    fields: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the arguments."""
        properties = {argument.name: argument.schema() for argument in self.arguments}
        properties["full"] = {"type": "boolean", "description": "the complete report, not at most 4 kB"}
        required = [argument.name for argument in self.arguments if argument.required]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    def needs_run(self, given: Mapping[str, Any]) -> bool:
        """Return whether a call needs --allow-run."""
        return self.runs or any(argument.runs and given.get(argument.name) for argument in self.arguments)

    def command(self, given: Mapping[str, Any], roots: Roots, allow_run: bool) -> list[str]:
        """Return the arguments of `areal-debug` that answer a call.

        Raises BadCall for arguments that the tool does not take, and what needs --allow-run.
        """
        known = [argument.name for argument in self.arguments]
        if unknown := sorted(set(given) - {*known, "full"}):
            raise BadCall(f"{self.name} has no argument {unknown[0]!r}: its arguments are {', '.join(known)}")
        if not isinstance(given.get("full", False), bool):
            raise BadCall(f"full is {str(given['full'])[:80]!r}: expected boolean")
        if self.needs_run(given) and not allow_run:
            raise BadCall(
                f"this call of {self.name} executes code, starts or reads processes, and this server may not: ask the "
                "user to start it with areal-debug mcp --allow-run"
            )
        options, words = ["--json"], []
        for argument in self.arguments:
            value = given.get(argument.name)
            if value is None or value is False:
                if argument.required:
                    raise BadCall(f"{self.name} needs {argument.name}: {argument.about}")
                options += argument.absent
            else:
                of_option, of_word = argument.words(value, roots)
                options += of_option
                words += of_word
        return [*self.verb, *options, "--", *words]


def parse_tool(name: str, row: Mapping[str, Any]) -> Tool:
    arguments = (Argument(key, **tupled(facts)) for key, facts in row["arguments"].items())
    return Tool(name, **tupled(row) | {"arguments": tuple(arguments)})


def tupled(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


TOOLS = {
    name: parse_tool(name, row)
    for name, row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}

NO_TOOL = Tool("no tool", "", ())


def find(name: str) -> Tool:
    """Return a tool by its name. Raises BadCall."""
    if name not in TOOLS:
        raise BadCall(f"there is no tool {name[:80]!r}: the tools are {', '.join(TOOLS)}")
    return TOOLS[name]
