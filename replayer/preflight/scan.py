"""Scan source files for what differs from run to run, each finding with file and line.

Static, so it sees what a repeat of a step may miss by chance: a random order that is the same in
both runs, a branch that is not taken. To accept a line, give the reason in a comment there, or just
above: `# deterministic: only names a file`.
"""

from collections.abc import Iterator, Sequence

from replayer.preflight.checks import PreflightFinding
from replayer.preflight.kernels import nondeterministic_kernels
from replayer.preflight.orders import orders_that_vary
from replayer.preflight.random_sources import Seeded, random_numbers, seeded_libraries
from replayer.preflight.settings_in_code import settings_in_code
from replayer.preflight.source_files import Source


def scan_sources(sources: Sequence[Source], device: str, deterministic: bool) -> list[PreflightFinding]:
    """Return the findings of all files, and an "ok" with their number if there are none.

    Args:
        device, deterministic: of the run; the bits of kernels vary on "cuda" alone.
    """
    seeded: dict[str, Seeded] = {}
    for source in sources:
        seeded[source.group] = seeded.get(source.group, Seeded()) | seeded_libraries(source)
    found = [
        finding
        for source in sources
        for finding in scan_source(source, seeded[source.group], device == "cuda", deterministic)
    ]
    if found:
        return found
    names = "1 file" if len(sources) == 1 else f"{len(sources)} files"
    return [PreflightFinding("source", "ok", f"nothing in {names} that the run imports varies by itself")]


def scan_source(
    source: Source, seeded: Seeded, on_cuda: bool, deterministic: bool
) -> Iterator[PreflightFinding]:
    """Yield the findings of a file in order of its lines, without those that it accepts."""
    hits = [
        *random_numbers(source, seeded),
        *orders_that_vary(source),
        *settings_in_code(source),
        *(nondeterministic_kernels(source, deterministic) if on_cuda else ()),
    ]
    seen: set[tuple[int, str]] = set()
    for hit in sorted(hits, key=lambda hit: (hit.node.lineno, hit.node.col_offset)):
        line = hit.node.lineno
        if line not in source.accepted_lines and (line, hit.check) not in seen:
            seen.add((line, hit.check))
            yield PreflightFinding(hit.check, hit.status, hit.seen, hit.next_step, source.shown, line)
