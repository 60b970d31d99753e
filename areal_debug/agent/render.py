"""Print what `areal-debug agent` reports: an episode turn by turn, and an agent under load."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from areal_core.agent.conversation import BROKEN
from areal_core.safety.printable import printable_block
from areal_debug.record.render import print_legend, style_of
from areal_debug.render import console, format_number, format_seconds, is_quiet, one_line, styled

if TYPE_CHECKING:
    from areal_debug.agent.loop_monitor import LoopReport
    from areal_debug.agent.record import RolloutFacts
    from areal_debug.agent.replay_episode import AgentReplay
    from areal_debug.agent.run import EpisodeReport, TurnFacts
    from areal_debug.agent.stress import Latency, StressReport

MAX_STACK_LINES = 12
EXCERPT = 160  # characters of a value that differs
BRANCH_WORDS = {
    "root": "first call",
    "fork": "another continuation",
    "sub_agent": "a conversation of its own",
    "separate": "a conversation of its own",
}


def print_episode(report: "EpisodeReport") -> None:
    """Print the row, each turn with its sampled tokens coloured by probability, and the rewards."""
    out = console()
    out.print(styled("[bold]{}[/bold]  {}", report.agent, report.engine))
    out.print(styled("[dim]row {}[/dim]", json.dumps(report.row, ensure_ascii=False)[:300]))
    for turn in report.turns:
        print_turn(turn)
    if report.turns:
        print_legend()
    if any(turn.branch not in ("root", "continued") for turn in report.turns):
        print_tree(report.turns)
    for row in report.rows:
        turns = ", ".join(map(str, row.turns))
        of_others = ", ".join(map(str, row.turns[: row.num_shared]))
        shared = f"; turn {of_others} is in that of an earlier row" if of_others else ""
        out.print(
            f"row of turn {turns}: reward {format_number(row.reward)}, "
            f"{row.num_trained} of {row.num_tokens} tokens in the loss mask"
            + (shared if row.num_shared else "")
        )
    for note in report.notes:
        out.print(styled("[yellow]note[/yellow]: {}", note))
    if report.failure is not None:
        out.print(styled("[yellow]failed by the model[/yellow]: {}", report.failure))
    if report.error is None:
        out.print(
            styled(
                "[green]finished[/green] after {} turns in {}",
                len(report.turns),
                format_seconds(report.wall_s),
            )
        )
        return
    out.print(styled("[red]failed[/red] after {} turns: {}", len(report.turns), report.error))
    for place in report.error_at or []:
        out.print(styled("  at {}", place))


def print_tree(turns: "list[TurnFacts]") -> None:
    """Print the calls as a tree of branches; a straight continuation stays on its branch."""
    tree = Tree(Text("episode tree", style="bold"), guide_style="dim")
    branches: dict[int, tuple[Tree, Text]] = {}  # the branch of each turn, and its label
    reasons: list[tuple[Text, Text]] = []
    for turn in turns:
        if turn.branch == "continued" and turn.parent is not None:
            branch, label = branches[turn.parent]
            label.append(f", {turn.turn}")
        else:
            label = Text(f"turn {turn.turn}")
            branch = (tree if turn.parent is None else branches[turn.parent][0]).add(label)
            after = "" if turn.parent is None else f"after turn {turn.parent}: "
            why = BROKEN.get(turn.branch) or BRANCH_WORDS[turn.branch]
            reasons.append((label, one_line(f"  {after}{why}", "yellow" if turn.branch in BROKEN else "dim")))
        branches[turn.turn] = branch, label
    for label, reason in reasons:
        label.append(reason)
    console().print(tree)


def print_turn(turn: "TurnFacts") -> None:
    """Print one call: its numbers, the new messages, the sampled tokens, and what was parsed."""
    out = console()
    facts = [
        f"prompt {turn.num_prompt_tokens} tokens"
        + (f", starting with the tokens of turn {turn.continues}" if turn.continues is not None else ""),
        f"sampled {len(turn.tokens)}, {turn.finish}",
        format_seconds(turn.latency_s),
    ]
    if turn.mean_logprob is not None and turn.lowest_logprob is not None:
        facts.append(f"logprob mean {turn.mean_logprob:.3f}, lowest {turn.lowest_logprob:.2f}")
    versions = sorted({token.version for token in turn.tokens if token.version is not None})
    facts.append(f"version {', '.join(map(str, versions))}" if versions else "no version")
    if turn.num_tools:
        facts.append(f"{turn.num_tools} tools")
    out.print()
    out.print(Text(f"turn {turn.turn}", style="bold") + Text("  " + "  ".join(facts), style="dim"))
    if turn.prefix_mismatch:
        out.print(styled("  [yellow]{}[/yellow]: {}", BROKEN[turn.branch], turn.prefix_mismatch))
    for message in turn.new_messages:
        out.print(one_line(f"  {message['role']:<10}", "bold blue") + Text(shown(message["content"])))
    sampled = Text.assemble(*((printable_block(token.text), style_of(token)) for token in turn.tokens))
    out.print(Text(f"  {'sampled':<10}", style="bold blue") + sampled)
    for call in turn.tool_calls:
        out.print(
            Text(f"  {'tool call':<10}", style="bold blue") + one_line(f"{call['name']}({call['arguments']})")
        )
    if turn.reward is not None:
        out.print(Text(f"  {'reward':<10}", style="bold blue") + Text(format_number(turn.reward)))


def shown(content: Any) -> str:
    """Return message content as indented text with control characters as symbols."""
    return printable_block(str(content)).replace("\n", "\n" + " " * 12)


def print_stress(report: "StressReport") -> None:
    """Print the verdict, the load, latencies, event loops, and what failed or blocked."""
    out = console()
    out.print(verdict(report))
    out.print(
        styled(
            "[bold]{}[/bold]  {}  {} prompts x {} samples, at most {:,} episodes at once, {}",
            report.agent,
            report.engine,
            report.num_prompts,
            report.group_size,
            report.most_at_once,
            format_seconds(report.wall_s),
        )
    )
    per_s = 1 / report.wall_s
    reward = "none" if report.mean_reward is None else format_number(report.mean_reward)
    out.print(
        styled(
            "{:,} episodes finished, {:,.1f}/s; {:,} calls, {:,.1f}/s; {:,.0f} tokens/s sampled; mean reward {}",
            report.num_finished,
            report.num_finished * per_s,
            report.calls.count,
            report.calls.count * per_s,
            report.num_output_tokens * per_s,
            reward,
        )
    )
    out.print(latency_table({"episode": report.episodes, "call of the engine": report.calls}))
    out.print(loop_table(report.loops))
    collection = report.collection
    out.print(
        styled(
            "[dim]garbage collection stopped all threads for {} in total, {} at most[/dim]",
            format_seconds(collection.total_s),
            format_seconds(collection.longest_s),
        )
    )
    for loop in report.loops:
        print_stalls(loop)
    for group in report.errors:
        out.print(styled("[red]{:,} episodes[/red]: {}", group.count, group.message))
        for line in group.traceback.rstrip().splitlines()[-MAX_STACK_LINES:]:
            out.print(one_line(f"    {line}", "dim"))


def verdict(report: "StressReport") -> Text:
    """Return one line: ready, or what is wrong and where."""
    num_failed = sum(group.count for group in report.errors)
    blocked = [stall for loop in report.loops for stall in loop.blocked()]
    problems = []
    if blocked:
        problems.append(f"blocks its event loop at {blocked[0].place}")
    if num_failed:
        problems.append(f"{num_failed:,} of {report.episodes.count:,} episodes fail")
    if problems:
        return styled("[red]not ready[/red]: {}", "; ".join(problems))
    worst = max(loop.lag_p99_s for loop in report.loops)
    return styled(
        "[green]ready[/green]: no episode fails, nothing blocks a loop (p99 lag {})", format_seconds(worst)
    )


def latency_table(rows: "dict[str, Latency]") -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("latency", "count", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="left" if heading == "latency" else "right")
    for name, latency in rows.items():
        times = (latency.p50_s, latency.p90_s, latency.p99_s, latency.max_s)
        table.add_row(name, f"{latency.count:,}", *map(format_seconds, times))
    return table


def loop_table(loops: "list[LoopReport]") -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("event loop", "lag p50", "lag p99", "lag max", "late"):
        table.add_column(heading, justify="left" if heading == "event loop" else "right")
    for loop in loops:
        share = loop.late_s / loop.watched_s if loop.watched_s else 0.0
        lags = (loop.lag_p50_s, loop.lag_p99_s, loop.lag_max_s)
        table.add_row(loop.name, *map(format_seconds, lags), f"{share:.0%} of the time")
    return table


def print_stalls(loop: "LoopReport") -> None:
    out = console()
    for stall in loop.stalls:
        style = "red" if stall in loop.blocked() else "yellow"
        out.print(
            styled(
                f"[{style}]{{}} loop was blocked[/] for {{}} in {{:,}} callbacks, the longest {{}}, at {{}}",
                loop.name,
                format_seconds(stall.total_s),
                stall.count,
                format_seconds(stall.longest_s),
                stall.place,
            )
        )
        for line in stall.stack[-MAX_STACK_LINES:]:
            out.print(one_line(f"    {line}", "dim"))
    if not loop.stalls and loop.late_s > loop.watched_s / 5:
        places = ", ".join(f"{share:.0%} {place}" for place, share in loop.busiest)
        out.print(styled("[yellow]{} loop busy[/yellow], not blocked; most at {}", loop.name, places))


def print_replay(report: "AgentReplay") -> None:
    """Print the verdict, and each difference with its place, both values and where to look."""
    out = console()
    counts = f"{report.num_episodes:,} episodes, {report.num_calls:,} calls, {report.num_tool_results:,} tool results"
    if not report.differences:
        out.print(
            styled(
                "[green]as recorded[/green]: {} of {} run again in {}", counts, report.agent, report.record
            )
        )
        return
    first = report.differences[0]
    place = f"step {first.step}, prompt {first.prompt_id}, sample {first.sample}"
    call = "" if first.call is None else f", call {first.call}"
    out.print(styled("[red]different[/red] in {}{}: {}", place, call, first.what))
    if is_quiet():
        return
    for title, value in (("recorded", first.recorded), ("now", first.now)):
        if first.recorded is not None or first.now is not None:
            out.print(styled("  {:<10}{}", title, excerpt(value, first.at)))
    if isinstance(first.recorded, str) and first.at is not None:
        out.print(styled("  [dim]they differ from character {} on[/dim]", first.at))
    for frame in first.frames:
        out.print(styled("  at {}", frame))
    for other in report.differences[1:]:
        out.print(
            styled(
                "also in step {}, prompt {}, sample {}: {}",
                other.step,
                other.prompt_id,
                other.sample,
                other.what,
            )
        )
    out.print(styled("[dim]run again: {}[/dim]", counts))
    show = f"areal-debug record show {report.record} --step {first.step} --prompt-id {first.prompt_id}"
    out.print(styled("[dim]{}[/dim]", show))


def excerpt(value: Any, at: int | None) -> str:
    """Return a value on one line; of a long text, what is around position `at`."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    begin = max((at or 0) - EXCERPT // 3, 0) if isinstance(value, str) else 0
    shown = text[begin : begin + EXCERPT]
    return ("…" if begin else "") + repr(shown) + ("…" if begin + EXCERPT < len(text) else "")


def print_rollout(agent: str, record: Path, steps: "list[RolloutFacts]") -> None:
    out = console()
    out.print(styled("[bold]{}[/bold]  recorded in {}", agent, str(record)))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in (
        "step",
        "prompts",
        "rows",
        "tokens in loss mask",
        "reward mean",
        "lowest",
        "highest",
        "equal",
        "versions",
    ):
        table.add_column(heading, justify="right")
    for name in ("turns: rows", "finished: rows"):
        table.add_column(name)
    for facts in steps:
        rewards = (facts.mean_reward, facts.lowest_reward, facts.highest_reward)
        table.add_row(
            str(facts.step),
            str(facts.num_prompts),
            str(facts.num_rows),
            f"{facts.num_trained:,} of {facts.num_tokens:,}",
            *map(format_number, rewards),
            str(facts.prompts_of_equal_reward),
            ", ".join(map(str, facts.versions)),
            ", ".join(f"{turns}: {rows}" for turns, rows in facts.turns.items()),
            ", ".join(f"{reason}: {rows}" for reason, rows in facts.finished.items()),
        )
    out.print(table)
    if all(facts.prompts_of_equal_reward == facts.num_prompts for facts in steps):
        out.print(
            styled(
                "[yellow]the samples of every prompt have equal rewards[/yellow]: group normalisation makes all advantages 0"
            )
        )
    out.print(
        styled("[dim]areal-debug record show {}   areal-debug replay {}[/dim]", str(record), str(record))
    )
