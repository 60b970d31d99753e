"""The server: tools and resources of the table, in the words of the protocol."""

import json
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import mcp_types as types
from mcp.server import Server, ServerRequestContext
from mcp.shared.exceptions import MCPError

from areal_debug.mcp.calls import Children
from areal_debug.mcp.explain import explain
from areal_debug.mcp.outcome import Outcome
from areal_debug.mcp.replies import result_of, text_of
from areal_debug.mcp.roots import BadCall, Roots
from areal_debug.mcp.tools import NO_TOOL, TOOLS, Tool, find
from areal_debug.skills import shipped_skills

NAME = "areal-debug"
SCHEME = "areal-debug://"
TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PLACES: dict[str, dict[str, str]] = TEXTS["places"]


def make_server(roots: Roots, allow_run: bool, version: str) -> Server[Children]:
    """Return a server of all tools that may be called; its transport runs it."""

    @asynccontextmanager
    async def children(server: Server[Children]) -> AsyncIterator[Children]:
        found = Children(roots)
        await found.prepare()
        try:
            yield found
        finally:
            await found.close()

    async def list_tools(ctx: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[described(t) for t in TOOLS.values() if allow_run or not t.runs])

    async def call_tool(
        ctx: ServerRequestContext[Children], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        return await answered(ctx, params, roots, allow_run)

    async def list_resources(ctx: Any, params: Any) -> types.ListResourcesResult:
        skills = [
            types.Resource(
                name=skill.name,
                uri=f"{SCHEME}skills/{skill.name}",
                description=skill.description,
                mime_type="text/markdown",
            )
            for skill in shipped_skills()
        ]
        return types.ListResourcesResult(resources=skills)

    async def list_templates(ctx: Any, params: Any) -> types.ListResourceTemplatesResult:
        found = [
            types.ResourceTemplate(
                name=name,
                uri_template=f"{SCHEME}{name}/{{+path}}",
                description=place["about"],
                mime_type=place["type"],
            )
            for name, place in PLACES.items()
        ]
        return types.ListResourceTemplatesResult(resource_templates=found)

    async def read(
        ctx: ServerRequestContext[Children], params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        text, kind = await resource(ctx, str(params.uri), roots)
        contents = types.TextResourceContents(uri=params.uri, text=text, mime_type=kind)
        return types.ReadResourceResult(contents=[contents])

    return Server(
        NAME,
        version=version,
        instructions=TEXTS["instructions"],
        lifespan=children,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read,
    )


def described(tool: Tool) -> types.Tool:
    hints = types.ToolAnnotations(read_only_hint=not tool.runs, destructive_hint=False, open_world_hint=False)
    return types.Tool(
        name=tool.name,
        description=tool.about,
        input_schema=tool.schema(),
        output_schema=TEXTS["output"],
        annotations=hints,
    )


async def answered(
    ctx: ServerRequestContext[Children], params: types.CallToolRequestParams, roots: Roots, allow_run: bool
) -> types.CallToolResult:
    """Answer a call; a refused one, and a verb that ends with a sentence, is an error result."""
    given = params.arguments or {}
    try:
        tool = find(params.name)
        command = tool.command(given, roots, allow_run)
        if tool.verb:
            outcome = await run(ctx, command, not tool.needs_run(given), imports=tool.imports)
        else:
            outcome = Outcome(0, explain(given["id"]))
    except ValueError as error:
        tool, outcome = NO_TOOL, Outcome(2, error=str(error))
    facts = result_of(tool, given, outcome, allow_run)
    text = types.TextContent(text=text_of(facts))
    return types.CallToolResult(content=[text], structured_content=facts, is_error=outcome.error is not None)


async def run(
    ctx: ServerRequestContext[Children],
    command: list[str],
    confined: bool,
    page: str = "",
    imports: tuple[str, ...] = (),
) -> Outcome:
    async def report(seconds: float, text: str) -> None:
        await ctx.session.report_progress(seconds, None, text or " ".join(command[:2]))

    return await ctx.lifespan_context.run(command, confined, report, page, imports)


async def resource(ctx: ServerRequestContext[Children], uri: str, roots: Roots) -> tuple[str, str]:
    """Return the text of a resource and its type. Raises MCPError."""
    kind, _, path = uri.removeprefix(SCHEME).partition("/")
    if kind == "skills" and (found := [skill for skill in shipped_skills() if skill.name == path]):
        return found[0].text, "text/markdown"
    if not uri.startswith(SCHEME) or kind not in PLACES or not path:
        raise refusal(
            f"there is no resource {uri[:200]!r}: expected {SCHEME} and skills/, records/ or pages/"
        )
    try:
        place = roots.resolve("path", unquote(path))
    except BadCall as error:
        raise refusal(str(error)) from None
    if kind == "pages":
        outcome = await run(ctx, ["open", "--", place], True, "page.html")
    else:
        outcome = await run(ctx, ["record", "ls", "--json", "--", place], True)
    if outcome.error is not None:
        raise refusal(outcome.error)
    text = outcome.report if kind == "pages" else json.dumps(outcome.report)
    return text, PLACES[kind]["type"]


def refusal(sentence: str) -> MCPError:
    return MCPError(types.INVALID_PARAMS, sentence)
