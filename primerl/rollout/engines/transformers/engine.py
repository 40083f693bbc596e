"""An engine in this process: transformers' continuous batching, with weights updated in flight."""

import asyncio
import copy
import itertools
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from primerl._optional import require
from primerl.rollout.engines.transformers.continuous_batching import (
    refuse_inference_mode,
    refuse_unsupported,
    start_batching,
    supported,
)
from primerl.rollout.engines.transformers.served_weights import match_tensors
from primerl.types import Completion, PolicyVersion, SamplingParams

# A temperature so low that any two different float32 logits decide the sample: greedy, per request.
GREEDY_TEMPERATURE = 1e-10
STOP_S = 30.0


@attrs.define(eq=False)
class _Request:
    """A request in flight. It outlives its id: a recomputed one is submitted again."""

    prompt_ids: list[int]
    params: SamplingParams
    done: "asyncio.Future[Completion]"
    id: str = ""
    resumed_at: int = 0
    """Tokens that were sampled before the current submission, and are part of its prompt."""
    token_ids: list[int] = attrs.Factory(list)
    logprobs: list[float] = attrs.Factory(list)
    versions: list[int] = attrs.Factory(list)


class TransformersEngine:
    """Serves a copy of a Hugging Face causal language model, on CPU or CUDA.

        with rollout.TransformersEngine(model) as engine:
            completion = await engine.generate(prompt_ids, SamplingParams(max_tokens=64))

    Every token carries its processed logprob and the version of the weights that sampled it.
    ``update_weights`` takes effect between two tokens, while requests are in flight:

    - ``on_update="recompute"``: what a request has so far is processed again under the new
      weights. Each token's logprob is that of a plain forward pass under its version.
    - ``on_update="keep"``: the cache stays, so tokens sampled after an update attend to keys and
      values of older weights. Cheaper, and slightly off every version's policy. (A request that
      loses its cache for want of room is processed again under the weights of that moment.)

    Prefixes are never shared between requests: a shared block would survive an update. With
    transformers 5.17, whose batching cannot be paused, an update waits until the requests in
    flight have ended, and new ones wait for it; the two modes are then the same.

    All state lives on an event loop of the engine's own, so ``generate`` may be awaited on any
    loop and ``update_weights`` called from any thread.

    Args:
        model: a causal language model with full or sliding attention; it is copied.
        on_update: what an update does to requests in flight.
        max_concurrent: requests that are decoded together.
        cache_tokens: capacity of the key-value cache, in tokens.
        version: of the model's weights: 0, or the step at which a run goes on.
        seed: of the process's sampling generator. Requests in flight share it, so the order in
            which they are batched decides what each draws.

    Raises:
        ValueError: continuous batching cannot run this model.
        RuntimeError: inference mode is on; its tensors can't be updated.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        on_update: str = "recompute",
        max_concurrent: int = 128,
        cache_tokens: int = 16_384,
        version: PolicyVersion = 0,
        seed: int | None = None,
    ) -> None:
        require("transformers", extra="transformers")
        if on_update not in ("recompute", "keep"):
            raise ValueError(f"on_update={on_update!r}; expected 'recompute' or 'keep'")
        refuse_inference_mode()
        refuse_unsupported(model)
        served: Any = copy.deepcopy(model).requires_grad_(False)
        served.zero_grad()
        served.set_attn_implementation("sdpa")
        self._model = served
        self._on_update = on_update
        self._max_concurrent = max_concurrent
        self._cache_tokens = cache_tokens
        self._seed = seed
        self._version = version
        self._ids = itertools.count()
        self._requests: dict[str, _Request] = {}
        self._cancelled: list[str] = []
        self._failure: str | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._manager: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def version(self) -> PolicyVersion:
        """The version of the weights that sample the next token."""
        return self._version

    @property
    def context_length(self) -> int:
        """The most tokens of one request: the model's positions, or the cache if it is smaller."""
        positions: int = self._model.config.get_text_config().max_position_embeddings
        return min(positions, self._cache_tokens)

    @property
    def vocab_size(self) -> int:
        """The number of token ids that the model has embeddings for."""
        size: int = self._model.config.get_text_config().vocab_size
        return size

    def start(self) -> "TransformersEngine":
        """Begin to serve; ``with`` does this, and closes the engine at its end."""
        refuse_inference_mode()
        self._manager = start_batching(
            self._model,
            max_concurrent=self._max_concurrent,
            cache_tokens=self._cache_tokens,
            seed=self._seed,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="primerl-engine", daemon=True
        )
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop serving; requests in flight fail."""
        loop, thread, manager = self._loop, self._thread, self._manager
        self._loop = None
        if manager is not None:
            manager.stop(block=True, timeout=STOP_S, **supported(manager.stop, hard_stop=True))
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(self._finish(), loop).result(STOP_S)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(STOP_S)
            loop.close()

    def __enter__(self) -> "TransformersEngine":
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,  # noqa: ARG002  one replica: every session is at home
    ) -> Completion:
        """Sample one completion; cancelling the awaiting task cancels the request.

        ``temperature=0`` is greedy, with a processed logprob of 0.

        Raises:
            ValueError: the request is longer than the context, or asks for what this engine does
                not sample (``top_p``, ``top_k``, a seed per request).
            RuntimeError: the engine is not running, or generation failed.
        """
        prompt = [int(token) for token in prompt_ids]
        self._check(prompt, params)
        return await asyncio.wrap_future(self._submit_coroutine(self._generate(prompt, params)))

    def update_weights(
        self, tensors: Mapping[str, Tensor], *, version: int, timeout_s: float = 600.0
    ) -> None:
        """Serve new weights from the next token on; returns when they are in place.

        Args:
            tensors: by name: the parameters and saved buffers of the model, a shared tensor under
                either name.
            version: the policy version that they are.
            timeout_s: how long the requests in flight may take to come to a halt.

        Raises:
            ValueError: names or shapes are not the model's, or the version goes back. The weights
                are then as they were.
            RuntimeError: it took longer than ``timeout_s``.
        """
        refuse_inference_mode()
        if version < self._version:
            raise ValueError(f"version {version} is older than {self._version}, which is served")
        pairs = match_tensors(self._model, tensors)
        future = self._submit_coroutine(self._update(pairs, version))
        try:
            future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise RuntimeError(f"the weight update took longer than {timeout_s:.0f} s") from None

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        if not prompt:
            raise ValueError("the prompt is empty; a completion needs at least one token before it")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise ValueError(
                f"the prompt has a token outside the model's vocabulary of {self.vocab_size}: is "
                "the tokenizer the model's own?"
            )
        if len(prompt) + params.max_tokens > self.context_length:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and max_tokens={params.max_tokens} exceed the "
                f"context of {self.context_length} tokens"
            )
        if params.top_p < 1 or params.top_k != -1:
            raise ValueError(
                f"top_p={params.top_p}, top_k={params.top_k}: this engine samples from the full "
                "distribution (top_p=1, top_k=-1)"
            )
        if params.seed is not None:
            raise ValueError("this engine has no seed per request; pass TransformersEngine(seed=)")

    def _submit_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        if self._loop is None:
            coroutine.close()
            raise RuntimeError(
                "the engine is not running; use `with TransformersEngine(...) as engine`"
            )
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    # ---- on the engine's event loop ----

    async def _generate(self, prompt: list[int], params: SamplingParams) -> Completion:
        assert self._loop is not None
        request = _Request(prompt, params, self._loop.create_future())
        await self._open.wait()
        self._submit(request)
        try:
            return await request.done
        finally:
            self._requests.pop(request.id, None)
            if request.done.cancelled():
                self._manager.cancel_request(request.id)
                self._cancelled.append(request.id)

    def _submit(self, request: _Request) -> None:
        """Hand a request, and what it has so far, to the batching loop."""
        request.resumed_at = len(request.token_ids)
        request.id = f"primerl-{next(self._ids)}"
        self._requests[request.id] = request
        self._manager.register_result_handler(request.id, self._receive)
        accepted = self._manager.add_request(
            request.prompt_ids + request.token_ids,
            request_id=request.id,
            max_new_tokens=request.params.max_tokens - len(request.token_ids),
            streaming=True,
            eos_token_id=list(request.params.stop_token_ids),
            temperature=float(request.params.temperature or GREEDY_TEMPERATURE),
        )
        if accepted is None:
            raise RuntimeError(f"generation has stopped: {self._failure or 'unknown cause'}")

    def _receive(self, output: Any) -> None:
        """Take in what a request has sampled; called after every token."""
        request = self._requests.get(output.request_id)
        if request is None or request.done.done():
            return
        fresh = slice(len(request.token_ids) - request.resumed_at, None)
        request.token_ids.extend(output.generated_tokens[fresh])
        request.logprobs.extend(output.logprobs[fresh])
        request.versions.extend([self._version] * len(output.generated_tokens[fresh]))
        if output.error is not None:
            self._failure = output.error
            request.done.set_exception(RuntimeError(f"generation failed: {output.error}"))
        elif output.is_finished():
            stopped = request.token_ids[-1] in request.params.stop_token_ids
            request.done.set_result(
                Completion(
                    token_ids=request.token_ids,
                    logprobs=request.logprobs,
                    versions=request.versions,
                    finish_reason="stop" if stopped else "length",
                )
            )

    async def _update(self, pairs: list[tuple[Tensor, Tensor]], version: int) -> None:
        if not hasattr(self._manager, "pause"):  # transformers < 5.19
            return await self._drain_and_load(pairs, version)
        restart = list(self._requests.values()) if self._on_update == "recompute" else []
        for request in restart:
            self._manager.cancel_request(request.id)
            self._cancelled.append(request.id)
        try:
            with self._manager.pause():
                # The loop is parked between two steps. Results that it delivered are queued here,
                # in order; let them be received, so that a token gets the version that sampled it.
                await asyncio.sleep(0)
                self._load(pairs, version)
                for request in restart:
                    if self._requests.pop(request.id, None) and not request.done.done():
                        self._submit(request)
                self._forget_cancelled()
        except Exception as error:
            for request in restart:  # they were withdrawn, and nothing else would answer them
                if not request.done.done():
                    request.done.set_exception(RuntimeError(f"the weight update failed: {error}"))
            raise

    async def _drain_and_load(self, pairs: list[tuple[Tensor, Tensor]], version: int) -> None:
        self._open.clear()
        try:
            while self._requests:
                waiting = [request.done for request in self._requests.values()]
                await asyncio.wait(waiting)
                await asyncio.sleep(0)  # let the finished ones leave the table
            self._load(pairs, version)
            self._forget_cancelled()
        finally:
            self._open.set()

    def _load(self, pairs: list[tuple[Tensor, Tensor]], version: int) -> None:
        with torch.no_grad():
            for served, new in pairs:
                served.copy_(new)
        self._version = version

    def _forget_cancelled(self) -> None:
        """Drop the handlers of cancelled requests, which end without a last result."""
        handlers = self._manager.output_router.result_handlers
        for request_id in self._cancelled:
            handlers.pop(request_id, None)
        self._cancelled.clear()

    async def _finish(self) -> None:
        """Fail what is in flight, so that nothing waits for a closed engine."""
        for request in self._requests.values():
            if not request.done.done():
                request.done.set_exception(RuntimeError("the engine was closed"))
        await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
