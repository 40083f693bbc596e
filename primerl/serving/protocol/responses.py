"""Schemas, size limits and conversion of vLLM servers' responses.

Servers are not trusted. The request bounds the size of a response, types bound its numbers, and no
number in a response determines how much memory is allocated.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from primerl.rollout.engines.contract import BadCompletion
from primerl.types import Completion, PolicyVersion

NO_LOGPROB = -9999.0  # vLLM's replacement for -inf and NaN
RESPONSE_BYTES = 1 << 16  # bound on a response without its tokens
TOKEN_BYTES = 1 << 10  # bound on a token with its logprob and span; vLLM needs about 200

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
T = TypeVar("T")


class VersionSpan(msgspec.Struct):
    """The tokens [``start``, ``end``), sampled by the weights with the label ``version``."""

    version: str | None
    start: Int32
    end: Int32


class TokenLogprob(msgspec.Struct, gc=False):
    """A token id and its logprob."""

    logprob: float
    token_id: Int32 | None = None


class Logprobs(msgspec.Struct):
    """The logprobs of a completion's tokens."""

    content: list[TokenLogprob]


class Choice(msgspec.Struct):
    """One completion."""

    finish_reason: str | None
    token_ids: list[Int32]
    logprobs: Logprobs | None = None
    routed_experts: str | None = None
    weight_versions: list[VersionSpan] | None = None


class Usage(msgspec.Struct):
    """The numbers of prompt and completion tokens, as counted by the server."""

    prompt_tokens: int
    completion_tokens: int | None = None


class Response(msgspec.Struct):
    """The response to a completion request; valid ones have exactly one choice."""

    choices: list[Choice]
    request_id: str = ""
    model: str | None = None
    usage: Usage | None = None
    prompt_logprobs: list[dict[str, TokenLogprob] | None] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class ModelCard(msgspec.Struct):
    """A server's description of its model, or of an adapter that it has loaded."""

    id: str = ""
    max_model_len: int | None = None


class ModelCards(msgspec.Struct):
    """The response of the endpoint ``MODELS``."""

    data: list[ModelCard]


class WeightInfo(msgspec.Struct):
    """The response of the endpoint ``WEIGHT_INFO``."""

    weight_version: str | None


completions = msgspec.json.Decoder(Response)
model_cards = msgspec.json.Decoder(ModelCards)
weight_infos = msgspec.json.Decoder(WeightInfo)
anything: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def decode(decoder: "msgspec.json.Decoder[T]", content: bytes, where: str) -> T:
    """Decode a server's JSON response; ``where`` names the server in error messages.

    Raises:
        RuntimeError: the content is not JSON, does not match the schema, or is nested too deeply.
    """
    try:
        return decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RuntimeError(
            f"{where} sent a response without vLLM's schema: {error}; primerl needs vllm >=0.32: "
            f"{content[:200]!r}"
        ) from error


def most_bytes(completion_tokens: int, *, scored: int = 0) -> int:
    """Return the maximum size of a response in bytes, without expert routes.

    Args:
        completion_tokens: ``max_tokens`` of the request.
        scored: the number of requested logprobs of prompt tokens.
    """
    return RESPONSE_BYTES + TOKEN_BYTES * (completion_tokens + scored)


def read_response(
    content: bytes, where: str, *, request_id: str, prompt_length: int, adapter: str | None = None
) -> Response:
    """Decode a completion response and check that it answers its request.

    Raises:
        BadCompletion: the response does not match the schema, or answers another request.
    """
    try:
        response = decode(completions, content, where)
    except RuntimeError as error:
        raise BadCompletion(str(error)) from error
    if request_id not in response.request_id:
        raise BadCompletion(
            f"{where} answered the request {response.request_id!r:.80}, expected {request_id!r}"
        )
    if adapter is not None and response.model != adapter:
        raise BadCompletion(
            f"{where} answered under {response.model!r:.80}, expected the adapter {adapter!r}"
        )
    if len(response.choices) != 1:
        raise BadCompletion(f"{where} sent {len(response.choices)} completions, expected 1")
    usage, sampled = response.usage, len(response.choices[0].token_ids)
    if usage is not None and usage.prompt_tokens != prompt_length:
        raise BadCompletion(
            f"{where} answered a prompt of {usage.prompt_tokens} tokens, expected a length of "
            f"{prompt_length}"
        )
    if usage is not None and usage.completion_tokens not in (None, sampled):
        raise BadCompletion(
            f"{where} sent {sampled} tokens, but reports that it sampled {usage.completion_tokens}"
        )
    return response


def token_versions(
    choice: Choice,
    number: Callable[[str | None], PolicyVersion | None],
    *,
    adapter: str | None = None,
) -> list[PolicyVersion | None]:
    """Return the version of each token, or None for weights that are not a version of this run.

    Args:
        choice: a completion.
        number: a function from labels to versions.
        adapter: the label of the adapter that sampled all tokens; if None, the labels in the
            response's spans are used.

    Raises:
        BadCompletion: the spans do not cover each token once, in order.
    """
    count = len(choice.token_ids)
    if adapter is not None:
        return [number(adapter)] * count
    versions: list[PolicyVersion | None] = []
    for span in choice.weight_versions or []:
        if span.start != len(versions) or not span.start <= span.end <= count:
            raise BadCompletion(
                f"the server's weight_versions have a span of tokens {span.start} to {span.end}, "
                f"expected it to start at {len(versions)} and end at {count} or before"
            )
        versions += [number(span.version)] * (span.end - span.start)
    if len(versions) != count:
        raise BadCompletion(f"the server's weight_versions cover {len(versions)} of {count} tokens")
    return versions


def make_completion(choice: Choice, versions: Sequence[PolicyVersion]) -> Completion:
    """Convert a finished choice to a ``Completion``.

    Raises:
        BadCompletion: a logprob is missing, belongs to another token, or is -inf or NaN.
    """
    content = choice.logprobs.content if choice.logprobs is not None else []
    if len(content) != len(choice.token_ids):
        raise BadCompletion(
            f"the server sent {len(content)} logprobs for {len(choice.token_ids)} tokens"
        )
    for token, entry in zip(choice.token_ids, content, strict=True):
        if entry.token_id not in (None, token):
            raise BadCompletion(
                f"the server sent the logprob of {entry.token_id} with token {token}"
            )
    logprobs = [one.logprob for one in content]
    if not all(one > NO_LOGPROB for one in logprobs):
        raise BadCompletion(
            "a sampled token has a logprob of -inf or NaN: the server's weights are damaged"
        )
    return Completion(
        token_ids=choice.token_ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason=choice.finish_reason or "",
    )


def prompt_scores(response: Response, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the logprob of each prompt token given those before it, float32[t]; entry 0 is 0.

    Raises:
        RuntimeError: a logprob is missing, or is -inf or NaN.
    """
    rows = response.prompt_logprobs or []
    scores = np.zeros(len(token_ids), dtype=np.float32)
    if len(rows) != len(token_ids):
        raise RuntimeError(f"the server scored {len(rows)} of {len(token_ids)} tokens")
    for index in range(1, len(token_ids)):
        entry = (rows[index] or {}).get(str(token_ids[index]))
        if entry is None or not math.isfinite(entry.logprob) or entry.logprob <= NO_LOGPROB:
            raise RuntimeError(
                f"token {index} of the scored sequence has no logprob, or -inf or NaN: the "
                "server's weights are damaged"
            )
        scores[index] = entry.logprob
    return scores


def prompt_top_k(
    response: Response, token_ids: Sequence[int] | np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ``prompt_scores``, and the k likeliest tokens at each position with their logprobs.

    The arrays are float32[t], int32[t, k] and float32[t, k]; entry 0 of each is 0.

    Raises:
        RuntimeError: a logprob is missing, or is -inf or NaN.
    """
    scores = prompt_scores(response, token_ids)
    top_ids = np.zeros((len(token_ids), k), dtype=np.int32)
    top_logprobs = np.zeros((len(token_ids), k), dtype=np.float32)
    for index, row in enumerate(response.prompt_logprobs or []):
        if index == 0:
            continue
        # vLLM also lists the scored token, so a row may have k + 1 entries.
        best = sorted((row or {}).items(), key=lambda item: -item[1].logprob)[:k]
        if len(best) < k or not all(entry.logprob > NO_LOGPROB for _, entry in best):
            raise RuntimeError(
                f"position {index} of the scored sequence has {len(best)} tokens with a logprob, "
                f"expected {k} with finite logprobs"
            )
        top_ids[index] = [int(token) for token, _ in best]
        top_logprobs[index] = [entry.logprob for _, entry in best]
    return scores, top_ids, top_logprobs
