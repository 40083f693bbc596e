"""The rule for fields: each one that the clients' request types name is decided in a table."""

import asyncio
import importlib.util
import typing
from pathlib import Path

import pytest
from chat_tokenizer import RecordingEngine, chat_tokenizer

anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
openai = pytest.importorskip("openai", reason="openai is not installed")
from anthropic.types import beta, message_create_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import chat, responses
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params, response_input_param

from primerl import rollout
from primerl.rollout import AgentLimits
from primerl.rollout.gateways import fields
from primerl.rollout.gateways.fields import HarmlessField, RefusedField, ServedField
from primerl.types import SamplingParams

TOKENIZER = chat_tokenizer()
PARAMS = SamplingParams(max_tokens=64)


def members(kind):
    """Yield the classes of a union, also of unions inside it."""
    inside = typing.get_args(kind)
    if not inside:
        yield kind
    for one in inside:
        yield from members(one)


def names_of(kinds):
    """Return the fields of typed dictionaries, but for those with types that are not served."""
    return {name for kind in kinds for name in getattr(kind, "__annotations__", {})}


SERVED_ITEMS = (
    response_input_param.Message,
    response_input_param.FunctionCallOutput,
    response_input_param.ItemReference,
    response_input_param.AdditionalTools,
    responses.EasyInputMessageParam,
    responses.ResponseOutputMessageParam,
    responses.ResponseReasoningItemParam,
    responses.ResponseFunctionToolCallParam,
    responses.ResponseCustomToolCallParam,
    responses.ResponseCustomToolCallOutputParam,
)
SERVED_BLOCKS = (
    beta.BetaTextBlockParam,
    beta.BetaThinkingBlockParam,
    beta.BetaRedactedThinkingBlockParam,
    beta.BetaToolUseBlockParam,
    beta.BetaToolResultBlockParam,
)
TABLES = {
    "chat": (fields.CHAT, [completion_create_params.CompletionCreateParamsBase]),
    "responses": (fields.RESPONSES, [response_create_params.ResponseCreateParamsBase]),
    "messages": (
        fields.MESSAGES,
        [
            message_create_params.MessageCreateParamsBase,
            beta_create_params.MessageCreateParamsBase,
        ],
    ),
    "chat message": (fields.CHAT_MESSAGE, [*members(chat.ChatCompletionMessageParam)]),
    "chat tool": (fields.CHAT_TOOL, [*members(chat.ChatCompletionToolUnionParam)]),
    "chat call": (fields.CHAT_CALL, [*members(chat.ChatCompletionMessageToolCallUnionParam)]),
    "chat part": (
        fields.PART,
        [chat.ChatCompletionContentPartTextParam, chat.ChatCompletionContentPartRefusalParam],
    ),
    "responses item": (fields.RESPONSES_ITEM, SERVED_ITEMS),
    "responses tool": (
        fields.RESPONSES_TOOL,
        [responses.FunctionToolParam, responses.CustomToolParam, responses.NamespaceToolParam],
    ),
    "message": (
        fields.MESSAGE,
        [*members(anthropic.types.MessageParam), *members(beta.BetaMessageParam)],
    ),
    "messages tool": (fields.MESSAGES_TOOL, [anthropic.types.ToolParam, beta.BetaToolParam]),
    "block": (fields.BLOCK, SERVED_BLOCKS),
}


@pytest.mark.parametrize("name", TABLES)
def test_each_field_that_a_client_knows_is_decided(name):
    table, kinds = TABLES[name]
    known = names_of(kinds)
    assert len(known) > 1
    assert known - set(table) == set()


REQUESTS = {
    "/chat/completions": (fields.CHAT, {"messages": [{"role": "user", "content": "Hi"}]}),
    "/responses": (fields.RESPONSES, {"input": "Hi"}),
    "/messages": (
        fields.MESSAGES,
        {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]},
    ),
}
VALUES = ({"a": 1}, "odd", 0.5, [{"type": "odd"}])


def post_all(path, bodies):
    """Return the status and the answer for each body, and the engine's requests."""
    engine = RecordingEngine(TOKENIZER, lambda *_: "Hello.")

    async def main():
        import aiohttp

        async with (
            rollout.gateway(engine, TOKENIZER, params=PARAMS) as gateway,
            gateway.open(limits=AgentLimits(max_turns=1000)) as session,
            aiohttp.ClientSession() as http,
        ):
            found = []
            for body in bodies:
                headers = {"Authorization": f"Bearer {session.key}"}
                async with http.post(session.base_url + path, json=body, headers=headers) as answer:
                    found.append((answer.status, await answer.json()))
            return found

    return asyncio.run(main()), engine.requests


@pytest.mark.parametrize("path", REQUESTS)
def test_harmless_fields_change_nothing_and_others_are_refused_by_name(path):
    table, body = REQUESTS[path]
    harmless = [name for name, field in table.items() if isinstance(field, HarmlessField)]
    refused = [name for name, field in table.items() if isinstance(field, RefusedField)]
    unknown = ["unheard_of"]
    answers, requests = post_all(
        path,
        [{**body, name: value} for name in harmless for value in VALUES]
        + [{**body, name: None} for name in [*harmless, *refused, *unknown]]
        + [{**body, name: value} for name in refused for value in table[name].unless]
        + [{**body, name: "odd"} for name in [*refused, *unknown]],
    )
    named = refused + unknown
    served, others = answers[: -len(named)], answers[-len(named) :]
    assert {status for status, _ in served} == {200}
    assert len({tuple(prompt) for prompt, _ in requests}) == 1
    for name, (status, answer) in zip(named, others, strict=True):
        assert status == 400
        assert name in answer["error"]["message"]
        if path != "/messages":
            assert answer["error"]["param"] == name


INSIDE = [
    ("/chat/completions", {"messages": [{"role": "user", "content": "Hi", "odd": 1}]}),
    (
        "/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "odd": 1}]}]},
    ),
    ("/responses", {"input": [{"role": "user", "content": "Hi", "odd": 1}]}),
    ("/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi", "odd": 1}]}),
    (
        "/messages",
        {
            "max_tokens": 9,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "odd": 1}]}],
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), INSIDE, ids=str)
def test_unknown_fields_inside_are_refused_by_their_path(path, body):
    ((status, answer),), _ = post_all(path, [body])
    assert status == 400
    assert ".odd" in answer["error"]["message"]
    assert "ignore_fields=['odd']" in answer["error"]["message"]


FORMATS = [
    ("/chat/completions", {"response_format": {"type": "json_object"}}),
    ("/chat/completions", {"structured_outputs": {"json": {}}}),
    ("/chat/completions", {"guided_json": {}}),
    ("/responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}),
    ("/messages", {"output_format": {"type": "json_schema", "schema": {}}}),
    ("/messages", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
    ("/messages", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
    ("/messages", {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}),
    ("/messages", {"container": "c"}),
]
ACCEPTED = [
    ("/chat/completions", {"response_format": {"type": "text"}}),
    ("/responses", {"text": {"verbosity": "low", "format": {"type": "text"}}}),
    ("/responses", {"include": ["reasoning.encrypted_content"]}),
    ("/messages", {"output_config": {"effort": "low"}}),
    ("/messages", {"mcp_servers": []}),
    (
        "/messages",
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    ),
    ("/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
]


@pytest.mark.parametrize(("path", "extra"), FORMATS, ids=str)
def test_what_would_change_replies_or_histories_is_refused(path, extra):
    ((status, answer),), requests = post_all(path, [{**REQUESTS[path][1], **extra}])
    assert status == 400
    (name,) = extra
    assert name in answer["error"]["message"]
    assert requests == []


@pytest.mark.parametrize(("path", "extra"), ACCEPTED, ids=str)
def test_settings_that_change_nothing_are_accepted(path, extra):
    ((status, _),), _ = post_all(path, [{**REQUESTS[path][1], **extra}])
    assert status == 200


def test_every_decision_has_a_reason():
    for table in (fields.CHAT, fields.RESPONSES, fields.MESSAGES, fields.BLOCK):
        for field in table.values():
            assert isinstance(field, ServedField) or len(field.why) > 10


def test_the_documentation_has_the_tables():
    """Otherwise run python tools/gateway_fields.py docs/gateway-fields.md."""
    root = Path(__file__).parents[3]
    spec = importlib.util.spec_from_file_location(
        "gateway_fields", root / "tools/gateway_fields.py"
    )
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert (root / "docs" / "gateway-fields.md").read_text(encoding="utf-8") == tool.page()


def test_ignored_fields_are_names():
    with pytest.raises(ValueError, match="expected a list of names"):
        rollout.gateway(None, TOKENIZER, ignore_fields="response_format")


def test_refusals_are_logged_once(caplog):
    body = {**REQUESTS["/chat/completions"][1], "unheard_of": 1}
    post_all("/chat/completions", [body, body])
    said = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(said) == 1
    assert "'unheard_of'" in said[0]
