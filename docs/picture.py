"""Draw the output of a command as an SVG picture of a terminal.

Usage: python docs/picture.py -o docs/demo.svg areal-debug demo
"""

import argparse
import io
import os
import re
import subprocess
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 128


def main() -> None:
    """Run the command as on a terminal of `WIDTH` columns and save its output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, help="SVG file to write")
    parser.add_argument("--cut", type=int, help="maximum number of lines; others are left out in the middle")
    parser.add_argument("--as", dest="shown", help="the command line to show, instead of the one that is run")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    environment = os.environ | {"FORCE_COLOR": "1", "TTY_INTERACTIVE": "0", "COLUMNS": str(WIDTH)}
    done = subprocess.run(options.command, stdout=subprocess.PIPE, text=True, env=environment)
    lines = shorten(done.stdout.splitlines(), options.cut)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {options.shown or ' '.join(options.command)}", style="bold"))
    console.print(Text.from_ansi("\n".join(lines)))
    picture = console.export_svg(title="areal-debug")
    # Fonts from the network would be missing offline, and would report each reader to their host.
    options.output.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


def shorten(lines: list[str], most: int | None) -> list[str]:
    """Return the first and the last lines, and between them a line with the number of others."""
    if most is None or len(lines) <= most:
        return lines
    head, tail = most // 2, most - most // 2
    return [*lines[:head], f"    ... {len(lines) - most} more lines ...", *lines[-tail:]]


if __name__ == "__main__":
    main()
