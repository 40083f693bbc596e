"""A client of an endpoint that takes and returns messages, for models that are only evaluated.

The endpoint serves OpenAI's chat completions, which most servers offer
(https://platform.openai.com/docs/api-reference/chat).
"""

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import attrs

from primerl._common.optional import require
from primerl.rollout.engines.contract import BadCompletion
from primerl.rollout.processes.background_loop import BackgroundLoop
from primerl.types import PolicyVersion, SamplingParams

RETRIES = 4  # by openai's client, which waits as long as a busy server requests
BUSY = (408, 409, 429)  # temporary, like server errors, so not a refusal
CLOSE_S = 10.0
CONTEXT_FULL = re.compile(r"context[ _](length|window)|maximum context", re.IGNORECASE)


class PromptTooLong(ValueError):
    """The endpoint refused a conversation because it does not fit the model's context."""


class NoSuchRoute(ValueError):
    """The endpoint answered 404: it has no such path, or no such model."""


@attrs.frozen(kw_only=True)
class ChatReply:
    """The reply to a conversation, with the endpoint's counts of tokens.

    ``message`` has OpenAI's form; ``finish_reason`` is ``"stop"``, ``"length"`` or
    ``"tool_calls"``.
    """

    message: Mapping[str, Any]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


class ChatEndpoint:
    """A client of an OpenAI-compatible chat endpoint, for ``rollout.verifiers``.

        with rollout.ChatEndpoint("http://127.0.0.1:8000/v1") as engine:
            for played in rollout.evaluate_tasks(engine, environment, environment.tasks, params):
                ...

    It returns neither tokens nor logprobs, so a worker refuses it. Close it after use.

    Args:
        url: the base URL, which usually ends with ``/v1``.
        model: the model's name; by default, the only model that the endpoint lists.
        api_key: by default the environment variable ``OPENAI_API_KEY``, if it is set.
        request_timeout_s: the timeout of one request.
        token_limit: the request field that carries ``max_tokens``; newer OpenAI models refuse the
            field ``max_tokens``.

    Raises:
        ImportError: the package openai is missing; verifiers installs it, too.
        ValueError: the URL is malformed, the endpoint refuses the key, or ``model`` is missing and
            the endpoint does not list exactly one model.
        RuntimeError: the endpoint can't be reached.
    """

    version: PolicyVersion = 0
    context_length = 1 << 30  # unknown: the endpoint itself refuses prompts that are too long

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        request_timeout_s: float = 600.0,
        token_limit: Literal["max_tokens", "max_completion_tokens"] = "max_tokens",
    ) -> None:
        if not re.match(r"https?://[^/]", url):
            raise ValueError(f"the endpoint is {url!r}; expected a URL such as http://HOST:PORT/v1")
        self._openai: Any = require("openai", extra="verifiers")
        self._url = url
        self._token_limit = token_limit
        self._loop = BackgroundLoop("primerl-chat")
        self._client: Any = None
        self._options = {
            "base_url": url,
            "api_key": api_key or os.environ.get("OPENAI_API_KEY") or "none",
            "timeout": request_timeout_s,
            "max_retries": RETRIES,
        }
        try:
            self.model = self._choose(model)
        except BaseException:
            self.close()
            raise

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> ChatReply:
        """Return the reply to ``messages``; cancelling the awaiting task cancels the request.

        Raises:
            PromptTooLong: the conversation does not fit the endpoint's context.
            ValueError: the endpoint refused the request.
            BadCompletion: the response has no message.
            Exception: the error of ``openai`` if the endpoint is busy, broken or unreachable.
        """
        fields = {
            "model": self.model,
            "messages": list(messages),
            "temperature": params.temperature,
            "top_p": params.top_p,
            self._token_limit: params.max_tokens,
        }
        if params.seed is not None:
            fields["seed"] = params.seed
        if tools:
            fields["tools"] = list(tools)
        beyond_openai: dict[str, Any] = {}
        if params.top_k != -1:
            beyond_openai["top_k"] = params.top_k
        if params.min_p > 0:
            beyond_openai["min_p"] = params.min_p
        if params.stop_token_ids:
            beyond_openai["stop_token_ids"] = list(params.stop_token_ids)
        request = self._request(
            lambda client: client.chat.completions.create(**fields, extra_body=beyond_openai)
        )
        return _reply(await asyncio.wrap_future(self._loop.submit(request)))

    async def generate(self, *_: Any, **__: Any) -> NoReturn:
        """Raise a ValueError: the endpoint takes messages, not tokens.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"the endpoint {self._url} takes messages, not tokens: it serves environments made by "
            "rollout.verifiers; for others use serving.VLLMEngine"
        )

    def close(self) -> None:
        """Cancel the requests in flight and disconnect."""
        if not self._loop.alive:
            return
        if self._client is not None:
            self._loop.submit(self._client.close()).result(CLOSE_S)
        self._loop.stop()

    def __enter__(self) -> "ChatEndpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _choose(self, model: str | None) -> str:
        """Return the model to request; raise at once if the endpoint can't be used at all."""
        try:
            asked = self._request(lambda client: client.with_options(max_retries=1).models.list())
            listed = self._loop.submit(asked).result()
            names = [one.id for one in listed.data]
        except self._openai.APIError as error:
            raise RuntimeError(f"the endpoint {self._url} can't be used: {error}") from error
        except NoSuchRoute:
            if model is None:
                raise ValueError(
                    f"the endpoint {self._url} does not list its models; say which with model="
                ) from None
            return model
        except (AttributeError, TypeError, json.JSONDecodeError):
            raise ValueError(
                f"the endpoint {self._url} does not answer as OpenAI's API does; is the address "
                "complete, with /v1?"
            ) from None
        if model is None and len(names) != 1:
            raise ValueError(f"the endpoint {self._url} serves {names}; say which with model=")
        return model or names[0]

    async def _request(self, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return the endpoint's answer; runs on the event loop that holds its connections."""
        if self._client is None:
            self._client = self._openai.AsyncOpenAI(**self._options)
        try:
            return await ask(self._client)
        except self._openai.APIStatusError as error:
            if error.status_code >= 500 or error.status_code in BUSY:
                raise
            if error.status_code == 404:
                raise NoSuchRoute(f"{self._url}: {error}") from error
            if error.code == "context_length_exceeded" or CONTEXT_FULL.search(str(error)):
                raise PromptTooLong(str(error)) from error
            raise ValueError(f"the endpoint {self._url} refused a request: {error}") from error


def _reply(response: Any) -> ChatReply:
    choices = getattr(response, "choices", None)
    if not choices or choices[0].message is None:
        raise BadCompletion(f"the endpoint's response has no message: {response!r:.200}")
    usage = response.usage
    reason = choices[0].finish_reason
    return ChatReply(
        message=choices[0].message.model_dump(exclude_none=True),
        finish_reason=reason if reason in ("length", "tool_calls") else "stop",
        prompt_tokens=0 if usage is None else usage.prompt_tokens,
        completion_tokens=0 if usage is None else usage.completion_tokens,
    )
