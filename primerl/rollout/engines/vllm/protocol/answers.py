"""Answers of vLLM servers: their form, their bounds, and what they mean.

A server is not trusted: the size of an answer is bounded by what was asked for, its numbers by
their types, and nothing is allocated by what a number says.
"""

import base64
import binascii
import io
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from primerl.rollout.engines.contract import BadCompletion
from primerl.types import Completion, PolicyVersion

NO_LOGPROB = -9999.0  # what vLLM writes in place of -inf and NaN
ANSWER_BYTES = 1 << 16  # of an answer without its tokens
TOKEN_BYTES = 1 << 10  # of a token with its logprob and span; vLLM's take about 200
ROUTE_BYTES = 1 << 13  # of a token's experts: 128 layers of 24 experts in base64, 2 bytes each

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
T = TypeVar("T")


class Span(msgspec.Struct):
    """Tokens ``start`` to ``end`` were sampled by weights called ``version``."""

    version: str | None
    start: Int32
    end: Int32


class TokenLogprob(msgspec.Struct):
    """The logprob of a token."""

    logprob: float
    token_id: Int32 | None = None


class Logprobs(msgspec.Struct):
    """The logprobs of a completion."""

    content: list[TokenLogprob]


class Choice(msgspec.Struct):
    """One completion."""

    finish_reason: str | None
    token_ids: list[Int32]
    logprobs: Logprobs | None = None
    routed_experts: str | None = None
    weight_versions: list[Span] | None = None


class Usage(msgspec.Struct):
    """How many tokens the server counted."""

    prompt_tokens: int
    completion_tokens: int | None = None


class Answer(msgspec.Struct):
    """The answer to a request; one choice, as one was asked for."""

    choices: list[Choice]
    request_id: str = ""
    usage: Usage | None = None
    prompt_logprobs: list[dict[str, TokenLogprob] | None] | None = None


class ModelCard(msgspec.Struct):
    """A served model."""

    max_model_len: int | None = None


class ModelCards(msgspec.Struct):
    """The answer of ``/v1/models``."""

    data: list[ModelCard]


class WeightInfo(msgspec.Struct):
    """The answer of ``/weight_info``."""

    weight_version: str | None


answers = msgspec.json.Decoder(Answer)
model_cards = msgspec.json.Decoder(ModelCards)
weight_infos = msgspec.json.Decoder(WeightInfo)
anything: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def decode(decoder: "msgspec.json.Decoder[T]", content: bytes, where: str) -> T:
    """The JSON of a server.

    Raises:
        RuntimeError: it is none, has another form, or is nested too deeply.
    """
    try:
        return decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RuntimeError(
            f"{where} answered what no vLLM server does: {error}; primerl works with vllm >=0.32: "
            f"{content[:200]!r}"
        ) from error


def most_bytes(completion_tokens: int, *, scored: int = 0, routed: int = 0) -> int:
    """The most bytes of an answer.

    Args:
        completion_tokens: the most that were asked for.
        scored: tokens of the prompt whose logprobs were asked for.
        routed: tokens whose experts may come along.
    """
    return ANSWER_BYTES + TOKEN_BYTES * (completion_tokens + scored) + ROUTE_BYTES * routed


def read_answer(content: bytes, where: str, *, request_id: str, prompt_length: int) -> Answer:
    """The answer of a server, which says of itself to which request it is.

    Raises:
        BadCompletion: it has another form than vLLM's, or answers another request.
    """
    try:
        answer = decode(answers, content, where)
    except RuntimeError as error:
        raise BadCompletion(str(error)) from error
    if request_id not in answer.request_id:
        raise BadCompletion(
            f"{where} answered the request {answer.request_id!r:.80}, and was asked {request_id!r}"
        )
    if len(answer.choices) != 1:
        raise BadCompletion(f"{where} answered {len(answer.choices)} completions, expected 1")
    usage, sampled = answer.usage, len(answer.choices[0].token_ids)
    if usage is not None and usage.prompt_tokens != prompt_length:
        raise BadCompletion(
            f"{where} answered a prompt of {usage.prompt_tokens} tokens, and was asked one of "
            f"{prompt_length}"
        )
    if usage is not None and usage.completion_tokens not in (None, sampled):
        raise BadCompletion(
            f"{where} answered {sampled} tokens, and says that it sampled {usage.completion_tokens}"
        )
    return answer


def span_versions(
    choice: Choice, number: Callable[[str | None], PolicyVersion | None]
) -> list[PolicyVersion | None]:
    """The version of each token, None where its weights have no version of this run.

    Args:
        choice: a completion.
        number: the version that a label names.

    Raises:
        BadCompletion: the spans do not cover each token once, in order.
    """
    versions: list[PolicyVersion | None] = []
    count = len(choice.token_ids)
    for span in choice.weight_versions or []:
        if span.start != len(versions) or not span.start <= span.end <= count:
            raise BadCompletion(
                f"the server's weight_versions have a span of tokens {span.start} to {span.end}, "
                f"expected one from {len(versions)} on, to {count} at most"
            )
        versions += [number(span.version)] * (span.end - span.start)
    if len(versions) != count:
        raise BadCompletion(
            f"the server's weight_versions have spans over {len(versions)} of {count} tokens"
        )
    return versions


def make_completion(choice: Choice, versions: Sequence[PolicyVersion]) -> Completion:
    """The completion of a finished choice.

    Raises:
        BadCompletion: a token has no logprob, that of another token, or one that is no number.
    """
    content = choice.logprobs.content if choice.logprobs is not None else []
    if len(content) != len(choice.token_ids):
        raise BadCompletion(
            f"the server sent {len(content)} logprobs for {len(choice.token_ids)} tokens"
        )
    for token, of in zip(choice.token_ids, content, strict=True):
        if of.token_id not in (None, token):
            raise BadCompletion(f"the server sent the logprob of {of.token_id} with token {token}")
    logprobs = [one.logprob for one in content]
    if not all(one > NO_LOGPROB for one in logprobs):
        raise BadCompletion(
            "a sampled token has a logprob of -inf or NaN: the served weights are damaged"
        )
    return Completion(
        token_ids=choice.token_ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason=choice.finish_reason or "",
    )


def prompt_scores(answer: Answer, token_ids: Sequence[int]) -> np.ndarray:
    """The logprob of each token of a prompt given those before it, float32[t]; entry 0 is 0.

    Raises:
        RuntimeError: a token has none, or one that is no number.
    """
    rows = answer.prompt_logprobs or []
    scores = np.zeros(len(token_ids), dtype=np.float32)
    if len(rows) != len(token_ids):
        raise RuntimeError(f"the server scored {len(rows)} of {len(token_ids)} tokens")
    for index in range(1, len(token_ids)):
        entry = (rows[index] or {}).get(str(token_ids[index]))
        if entry is None or not math.isfinite(entry.logprob) or entry.logprob <= NO_LOGPROB:
            raise RuntimeError(
                f"token {index} of the scored sequence has no logprob, or -inf or NaN: the "
                "served weights are damaged"
            )
        scores[index] = entry.logprob
    return scores


def routed_experts(choice: Choice) -> bytes | None:
    """The ``.npy`` file of the experts that each token was routed to, where the server sent it.

    Raises:
        BadCompletion: it is damaged, or would be larger in memory than it is here.
    """
    if choice.routed_experts is None:
        return None
    try:
        content = base64.b64decode(choice.routed_experts, validate=True)
    except binascii.Error as error:
        raise BadCompletion(f"the routed experts are no base64: {error}") from error
    file = io.BytesIO(content)
    npy: Any = np.lib.format
    try:
        npy.read_magic(file)
        shape, _, dtype = npy.read_array_header_1_0(file)
    except (ValueError, RecursionError, MemoryError) as error:  # a header nested too deeply
        raise BadCompletion(f"the routed experts are no .npy file: {error}") from error
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(content) - file.tell():
        raise BadCompletion(
            f"the routed experts have {len(content)} bytes, and say that they are {dtype}{shape}"
        )
    return content
