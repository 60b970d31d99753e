"""Write into each skill which tools of `areal-debug mcp` answer the commands of its steps.

python docs/skills.py
"""

import re
import shlex
from textwrap import fill

from areal_debug.mcp.tools import TOOLS, Tool
from areal_debug.skills import FOLDER, shipped_skills

COMMAND = re.compile(r"areal-debug [a-z][^`\n]*")
NOTE = "If you have the tools of `areal-debug mcp`"


def skills() -> dict[str, str]:
    """Return the text of each skill by its name: its steps, and the tools that answer them."""
    steps = {skill.name: skill.text.partition(f"\n{NOTE}")[0] for skill in shipped_skills()}
    return {name: text + server_note(text) for name, text in steps.items()}


def server_note(steps: str) -> str:
    """Say which tools answer the commands of the steps, where the agent has the server."""
    commands = [shlex.split(command)[1:] for command in COMMAND.findall(steps)]
    tools = [tool for tool in TOOLS.values() if any(answers(tool, command) for command in commands)]
    lines = [
        f"{NOTE}, call them in place of these commands, and follow",
        "the calls in `next` of each result:",
        "",
        *(fill(f"- `{tool.name}`: {tool.about}", 100, subsequent_indent="  ") for tool in tools),
    ]
    return "\n" + "\n".join(lines) + "\n" if tools else ""


def answers(tool: Tool, command: list[str]) -> bool:
    """Return whether a call of the tool runs this command: no other verb, option or word."""
    if not tool.verb or tuple(command[: len(tool.verb)]) != tool.verb:
        return False
    options = {one.option: one for one in tool.arguments if one.option}
    num_words = sum(1 for one in tool.arguments if not one.option and one.kind != "boolean")
    given, words, rest = set(), 0, iter(command[len(tool.verb) :])
    for word in rest:
        given.add(word if word.startswith("--") else "")
        words += not word.startswith("--")
        if word in options and options[word].kind != "boolean":
            next(rest, None)
    needed = {one.option for one in tool.arguments if one.required}
    return given <= {"", "--json", *options} and needed <= given | {""} and words <= num_words


if __name__ == "__main__":
    for name, text in skills().items():
        (FOLDER / name / "SKILL.md").write_text(text)
