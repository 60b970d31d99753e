"""Every field of the official clients' requests is in a table, and the tables are documented."""

import types
from pkgutil import resolve_name
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from areal_core.agent.apis import anthropic_messages, openai_chat, openai_completions, openai_responses
from areal_core.agent.apis.request_fields import TABLES, Table

# Imported when they are used: the two packages take as long to import as torch.
SCHEMAS = {
    "/v1/chat/completions": "openai.types.chat.completion_create_params:CompletionCreateParams",
    "/v1/completions": "openai.types.completion_create_params:CompletionCreateParams",
    "/v1/responses": "openai.types.responses.response_create_params:ResponseCreateParams",
    "/v1/messages": "anthropic.types.message_create_params:MessageCreateParams",
    "/v1/messages/count_tokens": "anthropic.types.message_count_tokens_params:MessageCountTokensParams",
}
# Tools that other companies host are refused by their type; their own fields are never read.
FUNCTIONS = {
    "/v1/responses": "openai.types.responses:FunctionToolParam",
    "/v1/messages": "anthropic.types:ToolParam",
    "/v1/messages/count_tokens": "anthropic.types:ToolParam",
}
PARSERS = {
    "/v1/chat/completions": openai_chat,
    "/v1/completions": openai_completions,
    "/v1/responses": openai_responses,
    "/v1/messages": anthropic_messages,
}
SMALLEST = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "?"}]},
    "/v1/completions": {"prompt": "?"},
    "/v1/responses": {"input": "?"},
    "/v1/messages": {"messages": [{"role": "user", "content": "?"}]},
}


def typed_dicts(annotation: Any) -> list[Any]:
    if hasattr(annotation, "__required_keys__"):
        return [annotation]
    return [found for argument in get_args(annotation) for found in typed_dicts(argument)]


def requested_fields(api: str, table: Table) -> set[str]:
    """Return the fields of a client's schema; nested ones where the table has nested rows."""

    def fields_of(schema: Any, path: str) -> set[str]:
        found = set()
        for name, annotation in get_type_hints(schema).items():
            full = f"{path}{name}"
            found.add(full)
            if any(row.startswith(f"{full}.") for row in table):
                nested = (
                    [resolve_name(FUNCTIONS[api])]
                    if name == "tools" and api in FUNCTIONS
                    else typed_dicts(annotation)
                )
                found |= {field for each in nested for field in fields_of(each, f"{full}.")}
        return found

    schema = resolve_name(SCHEMAS[api])
    variants = get_args(schema) if get_origin(schema) in (Union, types.UnionType) else (schema,)
    return {field for variant in variants for field in fields_of(variant, "")}


@pytest.mark.parametrize("api", SCHEMAS)
def test_every_field_of_the_installed_client_is_in_the_table(api):
    table = TABLES[api.removesuffix("/count_tokens")]
    requested = requested_fields(api, table)
    assert len(requested) >= 18
    assert sorted(requested - table.keys()) == []


class Reads(dict):
    """A body that notes which of its fields are read."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self.read: set[str] = set()

    def get(self, name, default=None):
        self.read.add(name)
        return super().get(name, default)

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name):
        self.read.add(name)
        return super().__contains__(name)


@pytest.mark.parametrize("api", TABLES)
def test_every_field_that_is_called_honoured_is_read(api):
    body = Reads(SMALLEST[api])
    PARSERS[api].parse_call(body, [])
    honoured = {name for name, rule in TABLES[api].items() if rule.use == "honoured" and "." not in name}
    assert sorted(honoured - body.read) == []
