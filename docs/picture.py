"""Draw what commands print as SVG pictures of a terminal, and take the page of a record as PNG.

Usage: python docs/picture.py FOLDER    all pictures of README.md; FOLDER gets the demo, if it has none
       python docs/picture.py -o docs/demo.svg areal-debug demo    one command
"""

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 128
DOCS = Path(__file__).resolve().parent
AREAL_DEBUG = str(Path(sys.executable).with_name("areal-debug"))
HANG_S = 90  # until which the ranks of examples/hang.py have started and wait
TERMINAL = os.environ | {"FORCE_COLOR": "1", "TTY_INTERACTIVE": "0", "COLUMNS": str(WIDTH)}


def main() -> None:
    """Draw one command, or all pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, help="SVG file to write, of the one command")
    parser.add_argument("--cut", type=int, help="maximum number of lines; others are left out in the middle")
    parser.add_argument("--as", dest="shown", help="the command line to show, instead of the one that is run")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="FOLDER, or with -o a command")
    options = parser.parse_args()
    if options.output:
        draw(options.output, options.shown or " ".join(options.command), run(options.command), options.cut)
    elif len(options.command) == 1:
        draw_all(Path(options.command[0]).resolve())
    else:
        parser.error("give the folder of the demo, or -o FILE.svg and a command")


def draw_all(folder: Path) -> None:
    """Run the commands of README.md on the demo in `folder`, and write each picture."""
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "runs/demo/record"
    if not record.exists():
        draw(DOCS / "demo.svg", "areal-debug demo", run([AREAL_DEBUG, "demo"], folder), None)
    for name, command in (
        ("replay", "areal-debug replay runs/demo/record --to-step 2"),
        ("consistency", "areal-debug consistency runs/demo/record --temperature 0.8"),
    ):
        draw(DOCS / f"{name}.svg", command, run([AREAL_DEBUG, *command.split()[1:]], folder), None)
    draw(DOCS / "hang.svg", "areal-debug hang", diagnosed_hang(folder), None)
    photograph_page(record, DOCS / "view.png")


def run(command: list[str], folder: Path | None = None) -> str:
    """Return what a command prints on a terminal of `WIDTH` columns."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=TERMINAL, cwd=folder)
    return done.stdout


def diagnosed_hang(folder: Path) -> str:
    """Start examples/hang.py, and return what `areal-debug hang` prints of it."""
    shutil.copytree(DOCS.parent / "examples", folder / "examples", dirs_exist_ok=True)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    with subprocess.Popen([*launch, "examples/hang.py"], cwd=folder, stderr=subprocess.DEVNULL) as job:
        try:
            command = [AREAL_DEBUG, "hang", "--pid", str(job.pid)]
            deadline = time.monotonic() + HANG_S
            while subprocess.run([*command, "-q"], capture_output=True).returncode != 1:
                if time.monotonic() > deadline:
                    sys.exit(f"examples/hang.py was not found to hang within {HANG_S} s")
            return run(command, folder)
        finally:
            job.terminate()


def photograph_page(record: Path, picture: Path) -> None:
    """Write the page of the record's last step, as Chromium shows it."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        sys.exit("no chromium on the path, so the page was not photographed: install it")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        run([AREAL_DEBUG, "view", "runs/demo/record", "-o", str(page)], record.parents[2])
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,800"]
        flags.append("--virtual-time-budget=10000")  # the page unpacks its numbers after it has loaded
        subprocess.run(
            [browser, *flags, f"--user-data-dir={folder}/profile", f"--screenshot={picture}", page.as_uri()],
            check=True,
            stderr=subprocess.DEVNULL,
            timeout=120,
        )


def draw(output: Path, title: str, printed: str, cut: int | None) -> None:
    """Write an SVG picture of a command line and what it printed."""
    lines = shorten(printed.splitlines(), cut)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {title}", style="bold"))
    console.print(Text.from_ansi("\n".join(lines)))
    picture = console.export_svg(title="areal-debug")
    # Fonts from the network would be missing offline, and would report each reader to their host.
    output.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


def shorten(lines: list[str], most: int | None) -> list[str]:
    """Return the first and the last lines, and between them a line with the number of others."""
    if most is None or len(lines) <= most:
        return lines
    head, tail = most // 2, most - most // 2
    return [*lines[:head], f"    ... {len(lines) - most} more lines ...", *lines[-tail:]]


if __name__ == "__main__":
    main()
