"""Write the skills for coding assistants from the pages of symptoms, whose steps they are.

    python docs/skills.py

A page has a section "Steps for a coding agent" below a comment with the skill's name and when to
use it. The skill adds which tools of `areal-debug mcp` answer the commands of its steps.
"""

import re
import shlex
from pathlib import Path
from textwrap import fill

from areal_debug.mcp.tools import TOOLS, Tool
from areal_debug.skills import FOLDER

PAGES = Path(__file__).parent / "symptoms"
SECTION = re.compile(
    r"<!-- skill: (?P<name>[a-z-]+)\n(?P<description>.*?) -->\n\n## Steps for a coding agent\n\n"
    r"(?P<steps>.*?)\n(?=\n## |\nMore: |\Z)",
    re.DOTALL,
)
COMMAND = re.compile(r"areal-debug [a-z][^`\n]*")


def skills() -> dict[str, str]:
    """Return the text of each skill by its name."""
    return dict(skill_of(page.read_text()) for page in sorted(PAGES.glob("*.md")))


def skill_of(page: str) -> tuple[str, str]:
    """Return name and text of the skill of a page."""
    section = SECTION.search(page)
    assert section is not None, "the page has no section with the steps of a skill"
    title, steps = page.splitlines()[0], section["steps"]
    front = f"---\nname: {section['name']}\ndescription: {' '.join(section['description'].split())}\n---\n"
    return section["name"], f"{front}\n{title}\n\n{steps}\n{server_note(steps)}"


def server_note(steps: str) -> str:
    """Say which tools answer the commands of the steps, where the agent has the server."""
    commands = [shlex.split(command)[1:] for command in COMMAND.findall(steps)]
    tools = [tool for tool in TOOLS.values() if any(answers(tool, command) for command in commands)]
    lines = [
        "If you have the tools of `areal-debug mcp`, call them in place of these commands, and follow",
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
