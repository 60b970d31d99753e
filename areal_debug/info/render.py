"""Print the report of `areal-debug info`."""

from rich.console import Console

from areal_debug.info.machine import Machine
from areal_debug.info.summary import Info
from areal_debug.info.verbs import install
from areal_debug.render import count, format_bytes, styled

NAME_WIDTH = 12


def print_info(out: Console, info: Info) -> None:
    """Print the verdict, then versions, machine, engines, schedulers, permissions and verbs."""
    style = "bold red" if info.problems else "bold green"
    out.print(styled(f"[{style}]{{}}[/{style}]", info.verdict))
    for problem in info.problems:
        out.print(styled("  {}", problem))
    installed = [f"{name} {version}" for name, version in info.packages.versions.items() if version]
    absent = [name for name, version in info.packages.versions.items() if not version]
    section(out, "Versions")
    line(out, "version", f"areal-debug {info.version}, Python {info.python}")
    line(out, "installed", ", ".join(installed))
    line(out, "absent", ", ".join(absent) or "none")
    print_machine(out, info.machine)
    section(out, "Engines and schedulers")
    for name, version in info.reachable.engines.items():
        line(out, name, version or "not installed")
    for server in info.reachable.servers:
        state = "accepts connections" if server.accepts else "does not accept connections"
        line(out, "server", f"{server.address} {state} (of {server.source})")
    for name, how in info.reachable.schedulers.items():
        line(out, name, how or "not found")
    section(out, "Permissions")
    line(out, "stacks", info.permissions.refuses_stacks or "py-spy may read processes of this user")
    line(out, "confinement", info.permissions.confinement or "none: this kernel has no Landlock")
    level = info.permissions.perf_level
    line(out, "perf", "unknown" if level is None else f"kernel.perf_event_paranoid is {level}")
    print_verbs(out, info)


def print_machine(out: Console, machine: Machine) -> None:
    section(out, "Machine")
    line(out, "system", machine.system)
    for gpu in machine.gpus:
        line(out, "GPU", gpu)
    if not machine.gpus:
        line(out, "GPU", machine.gpu_problem or "none found")
    line(out, "CPU", f"{machine.cpu}, {machine.usable_cores} of {count(machine.num_cores, 'core')} usable")
    limit = machine.memory_limit_bytes
    limited = f", at most {format_bytes(limit)} for this process" if limit else ""
    line(out, "memory", format_bytes(machine.memory_bytes) + limited)
    for disk in machine.disks:
        free = f"{format_bytes(disk.free_bytes)} free of {format_bytes(disk.total_bytes)}"
        line(out, "disk", f"{disk.place}: {free}")
    for name, value in machine.variables.items():
        line(out, "variable", f"{name}={value}")


def print_verbs(out: Console, info: Info) -> None:
    section(out, "Verbs")
    line(out, "work here", ", ".join(verb.name for verb in info.verbs if verb.works) or "none")
    for verb in info.verbs:
        if verb.extra:
            line(out, verb.name, f"needs {install(verb.extra)}: {info.packages.lacks[verb.extra][0]}")
        for limit in verb.limits:
            line(out, verb.name, f"not {limit}")


def section(out: Console, title: str) -> None:
    """Print a heading."""
    out.print()
    out.print(title, style="bold")


def line(out: Console, name: str, value: str) -> None:
    """Print a name and its value."""
    out.print(styled(f"  {name:<{NAME_WIDTH}} {{}}", value))
