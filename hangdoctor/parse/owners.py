"""Whose stacks the sections of a text are: by rank, role or process number, else by their order.

A heading that only counts (`7 ranks:`) or speaks of all or of the other ranks names none: these
ranks are numbered with what is free, and a note says so.
"""

from collections.abc import Iterable

from hangdoctor.parse.headings import MAX_RANKS, Section
from hangdoctor.parse.location import ProcessName, canonical, parse_name

NUMBERED = "stacks come with counts or descriptions, not ranks: ranks are numbered in the order of the text"
UNCOUNTED = "the text says `all` or `other` ranks and not how many: shown as {}; --world-size says it"


def owners_of(
    sections: list[Section], file: ProcessName, world_size: int | None
) -> tuple[list[tuple[ProcessName, Section]], list[str]]:
    """Return pairs of process and section in the order of the text, and notes for the reader.

    `file` is the process that the file's own name stands for; `world_size` is the number of ranks
    of the job, where it is known.
    """
    # Where a heading describes one of several processes, those without a heading count as well.
    all_described = file.rank is None and any(map(described, sections))
    by_pid: dict[int | None, ProcessName] = {}
    taken = {rank for section in sections if section.role is None for rank in section.ranks}
    pairs: list[tuple[ProcessName, Section]] = []
    notes: dict[str, None] = {}
    for number, section in enumerate(sections):
        if section.ranks:
            ranks: Iterable[int] = section.ranks
        elif described(section) or (all_described and section.pid is None):
            ranks = unnamed_ranks(section, taken, world_size)
            known = section.whose == "named" or world_size
            notes[NUMBERED if known else UNCOUNTED.format(f"{len(list(ranks))} of them")] = None
            taken |= set(ranks)
        else:
            owner = unranked(section, number, len(sections), file)
            # A process that comes again is its next sample; the first one of each container is 1.
            again = section.pid is not None and section.pid > 1
            pairs.append((by_pid.setdefault(section.pid, owner) if again else owner, section))
            continue
        role = parse_name(section.role).role if section.role else "trainer"
        pairs += [(ProcessName(canonical(role, rank), rank, role), section) for rank in ranks]
    return pairs, list(notes)


def described(section: Section) -> bool:
    """True if a heading describes processes without a rank or number of their own."""
    return (
        section.count > 1
        or section.whose != "named"
        or (section.headed and section.pid is None and not section.command)
    )


def unnamed_ranks(section: Section, taken: set[int], world_size: int | None) -> list[int]:
    if section.whose != "named":
        count = world_size - len(taken) if world_size else 2
    else:
        count = section.count
    found: list[int] = []
    rank = 0
    while len(found) < min(max(count, 1), MAX_RANKS):
        if rank not in taken:
            found.append(rank)
        rank += 1
    return found


def unranked(section: Section, number: int, total: int, file: ProcessName) -> ProcessName:
    if total == 1 or (number == 0 and file.rank is not None):
        return file
    if file.rank is not None:
        return ProcessName(f"{file.name}_child_{number - 1}", None, "child", file.host, file.name)
    if section.command.startswith("::_"):
        return ProcessName(section.command.removeprefix("::_"), None)
    return ProcessName(f"pid_{section.pid}" if (section.pid or 0) > 1 else f"process_{number}", None)
