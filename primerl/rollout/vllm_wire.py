"""What vLLM's token-in, token-out route is sent and answers, and what the answers mean."""

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from primerl.types import Completion, SamplingParams

NO_LOGPROB = -9999.0  # what vLLM writes in place of -inf and NaN
FIRST = -1  # the priority of what is not to queue behind rollouts
LEAST_TEMPERATURE = 0.01  # vLLM samples with this where less is asked for


class Refused(ValueError):
    """A server refused a request for what it asks; another one would too."""


class Span(msgspec.Struct):
    """Tokens ``start`` to ``end`` were sampled by weights called ``version``."""

    version: str | None
    start: int
    end: int


class TokenLogprob(msgspec.Struct):
    """The logprob of a sampled token."""

    logprob: float


class Logprobs(msgspec.Struct):
    """The logprobs of a completion."""

    content: list[TokenLogprob]


class Choice(msgspec.Struct):
    """One completion."""

    finish_reason: str | None
    token_ids: list[int]
    logprobs: Logprobs | None = None
    routed_experts: str | None = None
    weight_versions: list[Span] | None = None


class Answer(msgspec.Struct):
    """The answer to a request; one choice, as one was asked for."""

    choices: list[Choice]
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


class Labels:
    """Names of weight versions on servers: the run and the policy version, ``"3f2a91c0-12"``.

    A server's own checkpoint, weights of another run and weights that failed to load have labels
    that this run's ``number`` is None for: what they are is unknown.
    """

    def __init__(self, run: str) -> None:
        if not run or not run.isalnum():
            raise ValueError(f"run is {run!r}, expected letters and digits")
        self.run = run

    def name(self, version: int) -> str:
        """The label of a version of this run."""
        return f"{self.run}-{version}"

    def number(self, label: str | None) -> int | None:
        """The version that a label of this run names, or None."""
        run, _, version = (label or "").rpartition("-")
        return int(version) if run == self.run and version.isdecimal() else None


def generate_body(
    prompt: Sequence[int], params: SamplingParams, *, salt: str, priority: int = 0
) -> bytes:
    """A request for one completion that nothing but ``max_tokens`` and stop tokens end."""
    sampling: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop_token_ids": params.stop_token_ids,
        "logprobs": 0,  # that of the sampled token alone
        "ignore_eos": True,
        "detokenize": False,
    }
    if params.seed is not None:
        sampling["seed"] = params.seed
    body: dict[str, Any] = {"token_ids": prompt, "sampling_params": sampling, "cache_salt": salt}
    return msgspec.json.encode(body | ({"priority": priority} if priority else {}))


def score_body(token_ids: Sequence[int], *, salt: str | None = None, priority: int = 0) -> bytes:
    """A request for the logprobs of a prompt; vLLM does not read its prefix cache for them.

    With a ``salt`` it writes to the cache what requests of that salt read.
    """
    sampling = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, "detokenize": False}
    body: dict[str, Any] = {"token_ids": token_ids, "sampling_params": sampling}
    body |= {} if salt is None else {"cache_salt": salt}
    return msgspec.json.encode(body | ({"priority": priority} if priority else {}))


def read_answer(content: bytes, where: str) -> Answer:
    """The answer of a server.

    Raises:
        RuntimeError: it has another form than vLLM's.
    """
    try:
        answer = answers.decode(content)
    except msgspec.MsgspecError as error:
        raise RuntimeError(
            f"{where} answered what is no completion of vLLM's: {error}; primerl works with vllm "
            f">=0.32: {content[:200]!r}"
        ) from error
    if len(answer.choices) != 1:
        raise RuntimeError(f"{where} answered {len(answer.choices)} completions, expected 1")
    return answer


def span_versions(choice: Choice, labels: Labels) -> list[int | None]:
    """The version of each token, None where its weights have no version of this run.

    Raises:
        ValueError: the spans do not cover each token once, in order.
    """
    versions: list[int | None] = []
    for span in choice.weight_versions or []:
        if span.start != len(versions) or span.end < span.start:
            raise ValueError(f"a span begins at token {span.start}, expected {len(versions)}")
        versions += [labels.number(span.version)] * (span.end - span.start)
    if len(versions) != len(choice.token_ids):
        raise ValueError(f"spans cover {len(versions)} of {len(choice.token_ids)} tokens")
    return versions


def make_completion(choice: Choice, versions: Sequence[int], routes: str | None) -> Completion:
    """The completion of a finished choice.

    Raises:
        RuntimeError: a token has no logprob, or one that is no number.
    """
    content = choice.logprobs.content if choice.logprobs is not None else []
    logprobs = [min(token.logprob, 0.0) for token in content]
    if len(logprobs) != len(choice.token_ids):
        raise RuntimeError(
            f"the server sent {len(logprobs)} logprobs for {len(choice.token_ids)} tokens"
        )
    if not all(one > NO_LOGPROB for one in logprobs):
        raise RuntimeError(
            "a sampled token has a logprob of -inf or NaN: the served weights are damaged"
        )
    return Completion(
        token_ids=choice.token_ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason=choice.finish_reason or "",
        routes=routes,
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
        RuntimeError: it is damaged.
    """
    if choice.routed_experts is None:
        return None
    try:
        content = base64.b64decode(choice.routed_experts, validate=True)
    except binascii.Error as error:
        raise RuntimeError(f"the routed experts are no base64: {error}") from error
    if not content.startswith(b"\x93NUMPY"):
        raise RuntimeError("the routed experts are no .npy file")
    return content


def refusal(content: bytes) -> str:
    """What an answer that is an error says, in a line."""
    try:
        error: Any = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return repr(content[:300])
    for name in ("error", "message", "detail"):
        if isinstance(error, Mapping) and error.get(name):
            error = error[name]
    return str(error)[:500]


def read_metrics(text: str) -> dict[str, float]:
    """Counters and gauges of Prometheus's text form by name, summed over their labels."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0]
        if not name or line.startswith("#") or name.endswith(("_bucket", "_created", "_info")):
            continue
        try:
            values[name] = values.get(name, 0.0) + float(value)
        except ValueError:
            continue  # a line of a later form of the text
    return values
