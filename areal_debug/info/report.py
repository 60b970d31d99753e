"""What `areal-debug info` says: versions, machine, engines, schedulers, permissions and verbs."""

from areal_debug.info.machine import Machine
from areal_debug.info.summary import Info
from areal_debug.info.verbs import install
from areal_debug.render import count, format_bytes
from areal_debug.report.model import Facts, Report, Row, rows_of


def report_of(info: Info) -> Report:
    """Return the verdict, what is broken, and all facts by sections."""
    versions = info.packages.versions
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    absent = ", ".join(name for name, version in versions.items() if not version)
    rows = [
        Row("version", f"areal-debug {info.version}, Python {info.python}"),
        Row("installed", installed),
        Row("absent", absent or "none"),
    ]
    engines = info.reachable.engines.items()
    schedulers = [Row(name, how or "not found") for name, how in info.reachable.schedulers.items()]
    verdict, _, sentence = info.verdict.partition(": ")
    blocks = [
        Facts(rows_of("problem", info.problems, "bad")),
        Facts(rows, "Versions"),
        Facts(rows_of_machine(info.machine), "Machine"),
        Facts(
            [Row(name, found or "not installed") for name, found in engines] + schedulers,
            "Engines and schedulers",
        ),
        Facts(rows_of_permissions(info), "Permissions"),
        Facts(rows_of_verbs(info), "Verbs"),
    ]
    return Report(verdict, sentence, "bad" if info.problems else "good", blocks)


def rows_of_machine(machine: Machine) -> list[Row]:
    limit = machine.memory_limit_bytes
    limited = f", at most {format_bytes(limit)} for this process" if limit else ""
    cores = f"{machine.usable_cores} of {count(machine.num_cores, 'core')} usable"
    disks = [
        f"{disk.place}: {format_bytes(disk.free_bytes)} free of {format_bytes(disk.total_bytes)}"
        for disk in machine.disks
    ]
    return [
        Row("system", machine.system),
        *(Row("GPU", gpu) for gpu in machine.gpus or (machine.gpu_problem or "none found",)),
        Row("CPU", f"{machine.cpu}, {cores}"),
        Row("memory", format_bytes(machine.memory_bytes) + limited),
        *rows_of("disk", disks),
        *rows_of("variable", [f"{name}={value}" for name, value in machine.variables.items()]),
    ]


def rows_of_permissions(info: Info) -> list[Row]:
    level = info.permissions.perf_level
    return [
        Row("stacks", info.permissions.refuses_stacks or "py-spy may read processes of this user"),
        Row("confinement", info.permissions.confinement or "none: this kernel has no Landlock"),
        Row("perf", "unknown" if level is None else f"kernel.perf_event_paranoid is {level}"),
    ]


def rows_of_verbs(info: Info) -> list[Row]:
    rows = [Row("work here", ", ".join(verb.name for verb in info.verbs if verb.works) or "none")]
    for verb in info.verbs:
        if verb.extra:
            rows.append(Row(verb.name, f"needs {install(verb.extra)}: {info.packages.lacks[verb.extra][0]}"))
        rows += [Row(verb.name, f"not {limit}") for limit in verb.limits]
    return rows
