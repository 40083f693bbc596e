"""Tables of the fields of requests, each of which the gateway serves, ignores or refuses.

A field that carries history, or that would change the reply, is served or refused; it is never
ignored. A field is ignored only if a table here gives the reason why that is harmless. Fields that
no table has are refused, because nobody knows what they mean. Null is the same as absence.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

import attrs

from primerl.rollout.gateways.apis import BadRequest

_SHOWN = 80  # characters of a value in an error

SAMPLING = "the parameters of the rollout decide how tokens are sampled"
BOOKKEEPING = "it does not reach the policy"
HINT = "how much to reason or say is for the policy to learn"
CACHING = "it changes what is paid for, not what is said"
SCHEMA = "calls are checked by the agent, as those of other models"
SERVER_TOOLS = "no server runs such tools here; the log names them"
OWN_REPLY = "replies are known by their text, reasoning and calls"
_GRAMMAR = (
    "a grammar changes the distribution that tokens are sampled from, which the trainer would not "
    "know"
)
_BIAS = "it changes the distribution that tokens are sampled from, which the trainer would not know"
_STATE = "the gateway does not run it"
_SHORTENS = "the gateway does not shorten conversations"


@attrs.frozen
class ServedField:
    """A field that the gateway serves; ``how`` is said in the documentation."""

    how: str = ""


@attrs.frozen
class HarmlessField:
    """A field that the gateway ignores; ``why`` that is harmless."""

    why: str


@attrs.frozen
class RefusedField:
    """A field that the gateway refuses, but for values that ask for nothing."""

    why: str
    unless: tuple[Any, ...] = ()


Field = ServedField | HarmlessField | RefusedField
Fields = Mapping[str, Field]

SERVED = ServedField()


def _each(field: Field, *names: str) -> dict[str, Field]:
    return dict.fromkeys(names, field)


_SAMPLING_FIELDS = _each(
    HarmlessField(SAMPLING),
    "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "length_penalty", "min_tokens", "ignore_eos",
)  # fmt: skip
_VLLM_GRAMMARS = _each(
    RefusedField(_GRAMMAR),
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend",
    "guided_whitespace_pattern", "structural_tag", "structured_outputs", "grammar", "json_schema",
    "regex", "ebnf",
)  # fmt: skip

CHAT: Fields = {
    **_each(SERVED, "messages", "model", "stream", "stream_options", "tools"),
    **_each(SERVED, "max_tokens", "max_completion_tokens"),
    "tool_choice": ServedField("auto and none; a forced call is refused"),
    "parallel_tool_calls": ServedField("false: the reply ends with its first call"),
    "stop": ServedField("the reply ends with the token that completes the string"),
    "chat_template_kwargs": ServedField("arguments of the chat template"),
    "continue_final_message": ServedField("the last message is the beginning of the reply"),
    "add_generation_prompt": ServedField("false only with continue_final_message"),
    "web_search_options": HarmlessField(SERVER_TOOLS),
    **_SAMPLING_FIELDS,
    **_each(
        HarmlessField(BOOKKEEPING),
        "metadata", "user", "store", "service_tier", "safety_identifier", "moderation",
        "request_id", "priority", "usage", "provider", "route", "models", "transforms", "plugins",
        "session_id", "include_reasoning", "separate_reasoning", "return_token_ids",
        "return_tokens_as_token_ids", "skip_special_tokens", "spaces_between_special_tokens",
        "mock_testing_fallbacks", "tags",
    ),
    **_each(
        HarmlessField(CACHING),
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_salt",
        "prediction", "cache_control",
    ),
    **_each(
        HarmlessField(HINT),
        "reasoning_effort", "verbosity", "reasoning", "thinking", "enable_thinking",
        "thinking_budget", "reasoning_format", "thinking_token_budget",
    ),
    **_VLLM_GRAMMARS,
    "response_format": RefusedField(_GRAMMAR, ({"type": "text"},)),
    **_each(RefusedField(_BIAS), "bad_words", "allowed_token_ids", "logits_processors"),
    "use_beam_search": RefusedField(_BIAS, (False,)),
    "logit_bias": RefusedField(_BIAS, ({},)),
    "n": RefusedField("a rollout has one reply to a request", (1,)),
    "best_of": RefusedField("a rollout has one reply to a request", (1,)),
    "logprobs": RefusedField("the trainer gets logprobs, the client does not", (False,)),
    "top_logprobs": RefusedField("the trainer gets logprobs, the client does not", (0,)),
    "prompt_logprobs": RefusedField("the trainer gets logprobs, the client does not", (0,)),
    "functions": RefusedField("it was replaced by tools", ([],)),
    "function_call": RefusedField("it was replaced by tool_choice", ("auto", "none")),
    "modalities": RefusedField("replies are text", (["text"],)),
    "audio": RefusedField("replies are text"),
    "stop_token_ids": RefusedField("the rollout decides which tokens end a reply", ([],)),
    "include_stop_str_in_output": RefusedField("the text ends before the stop string", (False,)),
    "echo": RefusedField("a reply does not repeat its prompt", (False,)),
    "suffix": RefusedField("a reply has nothing after it", ("",)),
    "chat_template": RefusedField("the tokenizer's own template renders conversations"),
    "documents": RefusedField("pass documents as messages", ([],)),
    "add_special_tokens": RefusedField("the chat template writes special tokens", (False,)),
    "mm_processor_kwargs": RefusedField("messages are text", ({},)),
}  # fmt: skip

RESPONSES: Fields = {
    **_each(SERVED, "input", "instructions", "model", "stream", "tools", "max_output_tokens"),
    "tool_choice": ServedField("auto and none; a forced call is refused"),
    "parallel_tool_calls": ServedField("false: the reply ends with its first call"),
    "previous_response_id": ServedField("the conversation up to that response"),
    "include": ServedField("encrypted reasoning; what tools of servers would add is ignored"),
    "text": ServedField("verbosity is ignored, a format is refused"),
    "chat_template_kwargs": ServedField("arguments of the chat template"),
    **_SAMPLING_FIELDS,
    **_each(
        HarmlessField(BOOKKEEPING),
        "metadata", "user", "store", "service_tier", "safety_identifier", "moderation",
        "client_metadata", "stream_options", "request_id", "priority",
    ),
    **_each(
        HarmlessField(CACHING), "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"
    ),
    "reasoning": HarmlessField(HINT),
    "truncation": HarmlessField("a conversation that is too long is an error, and never cut"),
    "max_tool_calls": HarmlessField("it limits the tools of servers, which do not run here"),
    **_VLLM_GRAMMARS,
    "background": RefusedField("the client has to wait for the reply", (False,)),
    "conversation": RefusedField("send the conversation, or previous_response_id"),
    "context_management": RefusedField(_SHORTENS, ([],)),
    "prompt": RefusedField("the gateway stores no prompts"),
    "top_logprobs": RefusedField("the trainer gets logprobs, the client does not", (0,)),
    "logit_bias": RefusedField(_BIAS, ({},)),
}  # fmt: skip

MESSAGES: Fields = {
    **_each(SERVED, "messages", "system", "model", "max_tokens", "stream", "tools"),
    "tool_choice": ServedField("auto, none, disable_parallel_tool_use; a forced call is refused"),
    "stop_sequences": ServedField("the reply ends with the token that completes the string"),
    "thread": ServedField("the conversation up to that message"),
    "chat_template_kwargs": ServedField("arguments of the chat template"),
    "output_config": ServedField("effort is ignored, a format is refused"),
    "context_management": ServedField("edits that keep everything; others are refused"),
    **_SAMPLING_FIELDS,
    **_each(
        HarmlessField(BOOKKEEPING),
        "metadata", "service_tier", "inference_geo", "diagnostics", "user_profile_id",
        "workspace_id", "billing_policy", "fallback_credit_token", "betas", "anthropic_beta",
        "anthropic_version",
    ),
    "fallbacks": HarmlessField("there is one policy"),
    "speed": HarmlessField(CACHING),
    "cache_control": HarmlessField(CACHING),
    "thinking": HarmlessField(HINT),
    "output_format": RefusedField(_GRAMMAR),
    "compaction": RefusedField(_SHORTENS, ({"type": "disabled"},)),
    "container": RefusedField(_STATE),
    "mcp_servers": RefusedField(_STATE, ([],)),
    **_VLLM_GRAMMARS,
    "logit_bias": RefusedField(_BIAS, ({},)),
}  # fmt: skip

# ---- inside messages, tools and items ----

CHAT_MESSAGE: Fields = {
    **_each(SERVED, "role", "content", "tool_calls", "tool_call_id", "refusal"),
    **_each(SERVED, "reasoning_content", "reasoning", "reasoning_details", "thinking_blocks"),
    "name": ServedField("given to the chat template; ignored on replies"),
    "prefix": ServedField("true on the last message: it is the beginning of the reply"),
    **_each(HarmlessField(CACHING), "cache_control", "prompt_cache_breakpoint"),
    **_each(
        HarmlessField(OWN_REPLY),
        "annotations", "provider_specific_fields", "id", "phase", "images", "finish_reason",
        "created_at", "index", "parsed", "signature", "reasoning_signature", "extra_content",
    ),
    "function_call": RefusedField("it was replaced by tool_calls"),
    "audio": RefusedField("messages are text"),
}  # fmt: skip
CHAT_TOOL: Fields = {
    **_each(SERVED, "type", "function", "custom"),
    **_each(HarmlessField(CACHING), "cache_control"),
    **_each(HarmlessField(BOOKKEEPING), "defer_loading", "allowed_callers"),
}
FUNCTION: Fields = {
    **_each(SERVED, "name", "description", "parameters"),
    "strict": HarmlessField(SCHEMA),
    **_each(HarmlessField(CACHING), "cache_control"),
    **_each(HarmlessField(BOOKKEEPING), "returns", "response", "output_schema"),
}
CHAT_CALL: Fields = {
    **_each(SERVED, "id", "type", "function", "custom"),
    **_each(
        HarmlessField(OWN_REPLY),
        "index", "parsed_arguments", "extra_content", "provider_specific_fields", "caller",
    ),
}  # fmt: skip
PART: Fields = {
    **_each(SERVED, "type", "text", "refusal", "thinking"),
    **_each(HarmlessField(CACHING), "cache_control", "prompt_cache_breakpoint"),
    **_each(
        HarmlessField(OWN_REPLY),
        "annotations", "logprobs", "citations", "signature", "id", "parsed", "index",
    ),
}  # fmt: skip

RESPONSES_ITEM: Fields = {
    **_each(SERVED, "type", "role", "content", "id", "call_id", "name", "namespace"),
    **_each(SERVED, "arguments", "input", "output", "summary", "encrypted_content", "tools"),
    **_each(
        HarmlessField(OWN_REPLY),
        "status", "phase", "internal_chat_message_metadata_passthrough", "metadata", "created_by",
        "caller", "parsed_arguments", "agent", "reasoning", "description", "execution",
    ),
}  # fmt: skip
RESPONSES_TOOL: Fields = {
    **_each(SERVED, "type", "name", "description", "parameters", "tools", "format"),
    "strict": HarmlessField(SCHEMA),
    **_each(HarmlessField(BOOKKEEPING), "defer_loading", "allowed_callers", "output_schema"),
}
MESSAGE: Fields = {
    **_each(SERVED, "role", "content"),
    "clear_at": RefusedField(_SHORTENS, ("never",)),
    "output_config": HarmlessField(HINT),
    **_each(
        HarmlessField(OWN_REPLY),
        "id", "type", "model", "stop_reason", "stop_sequence", "usage", "container", "phase",
        "context_management", "stop_details", "diagnostics", "parsed_output",
    ),
    **_each(HarmlessField(CACHING), "cache_control"),
}  # fmt: skip
MESSAGES_TOOL: Fields = {
    **_each(SERVED, "type", "name", "description", "input_schema"),
    "strict": HarmlessField(SCHEMA),
    "cache_control": HarmlessField(CACHING),
    **_each(
        HarmlessField(BOOKKEEPING),
        "defer_loading", "allowed_callers", "input_examples", "eager_input_streaming",
    ),
}  # fmt: skip
BLOCK: Fields = {
    **_each(SERVED, "type", "text", "thinking", "signature", "data", "id", "name", "input"),
    **_each(SERVED, "tool_use_id", "content"),
    "toolset_name": RefusedField("only tools with a schema of their own are served"),
    "is_error": ServedField('the result is rendered with "Error: " before it'),
    "cache_control": HarmlessField(CACHING),
    **_each(HarmlessField(OWN_REPLY), "citations", "caller", "parsed_output"),
}


def check_fields(
    body: Mapping[str, Any], fields: Fields, *, where: str = "", ignored: Collection[str] = ()
) -> None:
    """Refuse fields that are neither served nor harmless.

    Args:
        body: a request, or an object inside a request.
        fields: the rule of each field.
        where: the path of ``body`` in the request, such as ``messages[0].``.
        ignored: further fields that the user has declared harmless.

    Raises:
        BadRequest: a field is refused or unknown.
    """
    for name, value in body.items():
        if value is None or name in ignored:
            continue
        field = fields.get(name)
        path = f"{where}{name}"
        if field is None:
            raise BadRequest(
                f"the gateway does not know the field {path!r}, and can't tell whether it changes "
                f"the reply; leave it out, or pass ignore_fields=[{name!r}] to the gateway",
                field=path,
                code="unknown_parameter",
            )
        if isinstance(field, RefusedField) and not any(_is(value, one) for one in field.unless):
            raise BadRequest(
                f"{path}={_shown(value)} is not supported: {field.why}; leave it out, or pass "
                f"ignore_fields=[{name!r}] to the gateway if it does not matter",
                field=path,
                code="unsupported_parameter",
            )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other
