"""Reports of `areal-debug agent`: an episode turn by turn, load, a replay."""

import json
from typing import TYPE_CHECKING, Any

from rich.text import Text
from rich.tree import Tree

from areal_core.agent.conversation import BROKEN
from areal_core.safety.printable import printable_block
from areal_debug.record.report import legend, style_of
from areal_debug.render import count, format_number, format_seconds, one_line
from areal_debug.report.model import Block, Facts, Report, Row, Styled, Table, rows_of

if TYPE_CHECKING:
    from areal_debug.agent.loop_monitor import LoopReport
    from areal_debug.agent.replay_episode import AgentReplay
    from areal_debug.agent.run import EpisodeReport, RowFacts, TurnFacts
    from areal_debug.agent.stress import StressReport

MAX_STACK_LINES = 12
EXCERPT = 160  # characters of a value that differs
WIDTH = 10  # of a label of a turn
BRANCH_WORDS = {
    "root": "first call",
    "fork": "another continuation",
    "sub_agent": "a conversation of its own",
    "separate": "a conversation of its own",
}


def report_of_episode(report: "EpisodeReport") -> Report:
    """Return each turn, its sampled tokens coloured by probability, rows and rewards."""
    blocks: list[Block] = []
    for turn in report.turns:
        blocks += blocks_of_turn(turn)
    if report.turns:
        blocks.append(Styled(legend()))
    if any(turn.branch not in ("root", "continued") for turn in report.turns):
        blocks.append(Styled(tree_of(report.turns)))
    rows = [Row("row", line_of_row(row)) for row in report.rows] + rows_of("note", report.notes, "unsure")
    if report.failure is not None:
        rows.append(Row("failed by the model", report.failure, "unsure"))
    blocks.append(Facts(rows + rows_of("at", report.error_at or ())))
    notes = [f"{report.agent}  {report.engine}", f"row {json.dumps(report.row, ensure_ascii=False)[:300]}"]
    turns = f"after {count(len(report.turns), 'turn')}"
    if report.error is not None:
        return Report("failed", f"{turns}: {report.error}", "bad", blocks, notes)
    return Report("finished", f"{turns} in {format_seconds(report.wall_s)}", "good", blocks, notes)


def line_of_row(row: "RowFacts") -> str:
    of_others = ", ".join(map(str, row.turns[: row.num_shared]))
    shared = f"; turn {of_others} is in that of an earlier row" if of_others and row.num_shared else ""
    trained = f"{row.num_trained} of {row.num_tokens} tokens in the loss mask"
    return f"of turn {', '.join(map(str, row.turns))}: reward {format_number(row.reward)}, {trained}{shared}"


def tree_of(turns: "list[TurnFacts]") -> Tree:
    """Return the calls as a tree of branches; a straight continuation stays on its branch."""
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
    return tree


def blocks_of_turn(turn: "TurnFacts") -> list[Block]:
    """Return one call: its numbers, the new messages, the sampled tokens, and what was parsed."""
    continues = "" if turn.continues is None else f", starting with the tokens of turn {turn.continues}"
    facts = [
        f"prompt {turn.num_prompt_tokens} tokens{continues}",
        f"sampled {len(turn.tokens)}, {turn.finish}",
        format_seconds(turn.latency_s),
    ]
    if turn.mean_logprob is not None and turn.lowest_logprob is not None:
        facts.append(f"logprob mean {turn.mean_logprob:.3f}, lowest {turn.lowest_logprob:.2f}")
    versions = sorted({token.version for token in turn.tokens if token.version is not None})
    facts.append(f"version {', '.join(map(str, versions))}" if versions else "no version")
    facts += [f"{turn.num_tools} tools"] if turn.num_tools else []
    texts = [Text(f"\nturn {turn.turn}", style="bold") + Text("  " + "  ".join(facts), style="dim")]
    if turn.prefix_mismatch:
        texts.append(one_line(f"  {BROKEN[turn.branch]}: {turn.prefix_mismatch}", "yellow"))
    texts += [labelled(message["role"], Text(shown(message["content"]))) for message in turn.new_messages]
    sampled = (Text(printable_block(token.text), style_of(token)) for token in turn.tokens)
    texts.append(labelled("sampled", Text.assemble(*sampled)))
    calls = (one_line(f"{call['name']}({call['arguments']})") for call in turn.tool_calls)
    texts += [labelled("tool call", call) for call in calls]
    if turn.reward is not None:
        texts.append(labelled("reward", Text(format_number(turn.reward))))
    return [Styled(text) for text in texts]


def labelled(label: str, text: Text) -> Text:
    return one_line(f"  {label:<{WIDTH}}", "bold blue") + text


def shown(content: Any) -> str:
    """Return message content as indented text with control characters as symbols."""
    return printable_block(str(content)).replace("\n", "\n" + " " * 12)


def report_of_stress(report: "StressReport") -> Report:
    """Return the verdict, the load, latencies, event loops, and what failed or blocked."""
    per_s = 1 / report.wall_s
    reward = "none" if report.mean_reward is None else format_number(report.mean_reward)
    load = (
        f"{report.num_finished:,} episodes finished, {report.num_finished * per_s:,.1f}/s; "
        f"{report.calls.count:,} calls, {report.calls.count * per_s:,.1f}/s; "
        f"{report.num_output_tokens * per_s:,.0f} tokens/s sampled; mean reward {reward}"
    )
    latencies = [
        [name, f"{x.count:,}", *map(format_seconds, (x.p50_s, x.p90_s, x.p99_s, x.max_s))]
        for name, x in (("episode", report.episodes), ("call of the engine", report.calls))
    ]
    total, longest = (format_seconds(s) for s in (report.collection.total_s, report.collection.longest_s))
    rows = [row for loop in report.loops for row in rows_of_stalls(loop)]
    for group in report.errors:
        rows.append(Row("failed", f"{group.count:,} episodes: {group.message}", "bad"))
        rows += [Row("", line, "dim") for line in group.traceback.rstrip().splitlines()[-MAX_STACK_LINES:]]
    blocks: list[Block] = [
        load,
        Table(("latency", "count>", "p50>", "p90>", "p99>", "max>"), latencies),
        Table(
            ("event loop", "lag p50>", "lag p99>", "lag max>", "late>"), [loop_cells(x) for x in report.loops]
        ),
        f"garbage collection stopped all threads for {total} in total, {longest} at most",
        Facts(rows),
    ]
    size = f"{report.num_prompts} prompts x {report.group_size} samples"
    at_once = f"at most {report.most_at_once:,} episodes at once, {format_seconds(report.wall_s)}"
    notes = [f"{report.agent}  {report.engine}  {size}, {at_once}"]
    if problems := problems_of(report):
        return Report("not ready", "; ".join(problems), "bad", blocks, notes)
    worst = format_seconds(max(loop.lag_p99_s for loop in report.loops))
    sentence = f"no episode fails, nothing blocks a loop (p99 lag {worst})"
    return Report("ready", sentence, "good", blocks, notes)


def problems_of(report: "StressReport") -> list[str]:
    num_failed = sum(group.count for group in report.errors)
    blocked = [stall for loop in report.loops for stall in loop.blocked()]
    problems = [f"blocks its event loop at {blocked[0].place}"] if blocked else []
    if num_failed:
        problems.append(f"{num_failed:,} of {report.episodes.count:,} episodes fail")
    return problems


def loop_cells(loop: "LoopReport") -> list[str]:
    share = loop.late_s / loop.watched_s if loop.watched_s else 0.0
    lags = (loop.lag_p50_s, loop.lag_p99_s, loop.lag_max_s)
    return [loop.name, *map(format_seconds, lags), f"{share:.0%} of the time"]


def rows_of_stalls(loop: "LoopReport") -> list[Row]:
    rows = []
    for stall in loop.stalls:
        text = (
            f"{loop.name} loop was blocked for {format_seconds(stall.total_s)} in {stall.count:,} callbacks, "
            f"the longest {format_seconds(stall.longest_s)}, at {stall.place}"
        )
        rows.append(Row("blocked", text, "bad" if stall in loop.blocked() else "unsure"))
        rows += [Row("", line, "dim") for line in stall.stack[-MAX_STACK_LINES:]]
    if not loop.stalls and loop.late_s > loop.watched_s / 5:
        places = ", ".join(f"{share:.0%} {place}" for place, share in loop.busiest)
        rows.append(Row("busy", f"{loop.name} loop busy, not blocked; most at {places}", "unsure"))
    return rows


def report_of_replay(report: "AgentReplay") -> Report:
    """Return each difference with its place, both values and where to look."""
    counts = f"{report.num_episodes:,} episodes, {report.num_calls:,} calls, {report.num_tool_results:,} tool results"
    if not report.differences:
        sentence = f"{counts} of {report.agent} run again in {report.record}"
        return Report("as recorded", sentence, "good")
    first = report.differences[0]
    call = "" if first.call is None else f", call {first.call}"
    rows = [
        Row(title, excerpt(value, first.at))
        for title, value in (("recorded", first.recorded), ("now", first.now))
        if first.recorded is not None or first.now is not None
    ]
    if isinstance(first.recorded, str) and first.at is not None:
        rows.append(Row("", f"they differ from character {first.at} on", "dim"))
    rows += rows_of("at", first.frames)
    rows += [
        Row("also", f"in step {x.step}, prompt {x.prompt_id}, sample {x.sample}: {x.what}")
        for x in report.differences[1:]
    ]
    look = f"areal-debug record show {report.record} --step {first.step} --prompt-id {first.prompt_id}"
    rows += [Row("run again", counts, "dim"), Row("look", look, "dim", is_code=True)]
    place = f"in step {first.step}, prompt {first.prompt_id}, sample {first.sample}{call}"
    return Report("different", f"{place}: {first.what}", "bad", [Facts(rows)])


def excerpt(value: Any, at: int | None) -> str:
    """Return a value on one line; of a long text, what is around position `at`."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    begin = max((at or 0) - EXCERPT // 3, 0) if isinstance(value, str) else 0
    part = text[begin : begin + EXCERPT]
    return ("…" if begin else "") + repr(part) + ("…" if begin + EXCERPT < len(text) else "")
