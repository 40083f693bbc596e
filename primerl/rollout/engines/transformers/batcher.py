"""Requests in flight in transformers' continuous batching, with weight updates between tokens."""

import asyncio
import itertools
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from primerl.rollout.engines.protocol import RouteStore, is_instant
from primerl.rollout.engines.transformers.routing import BatchRoutes
from primerl.types import Completion, PolicyVersion, SamplingParams

# So low that the largest float32 logit is always sampled, which makes one request greedy.
GREEDY_TEMPERATURE = 1e-10


@attrs.define(eq=False)
class _BatchedRequest:
    """A request in flight; to be recomputed, it is submitted again under another id."""

    prompt_ids: list[int]
    params: SamplingParams
    done: "asyncio.Future[str]"
    """A future whose result is the finish reason."""
    id: str = ""
    resumed_at: int = 0
    """Number of tokens sampled before the current submission, whose prompt includes them."""
    token_ids: list[int] = attrs.Factory(list)
    logprobs: list[float] = attrs.Factory(list)
    versions: list[int] = attrs.Factory(list)


class Batcher:
    """Samples with a batching manager; all methods run on one event loop.

    Args:
        manager: what ``start_batching`` returned.
        recompute: whether an update recomputes the KV cache of the requests in flight.
        version: the version of the weights.
        recorder: records expert routes, which are put into ``routes``.
    """

    def __init__(
        self,
        manager: Any,
        *,
        recompute: bool,
        version: PolicyVersion,
        recorder: BatchRoutes | None = None,
        routes: RouteStore | None = None,
    ) -> None:
        self.manager = manager
        self.can_pause = hasattr(manager, "pause")  # since transformers 5.19
        self.version = version
        self.requests: dict[str, _BatchedRequest] = {}
        self.open = asyncio.Event()
        """Cleared while new requests wait for an update."""
        self.open.set()
        self._recompute = recompute
        self._ids = itertools.count()
        self._cancelled: list[str] = []
        self._failure: str | None = None
        self._recorder = recorder
        self._routes = routes
        if recorder is not None:
            recorder.follow(manager, lambda: self.version)

    async def generate(self, prompt: list[int], params: SamplingParams) -> Completion:
        """Sample one completion.

        Raises:
            RuntimeError: generation failed.
        """
        request = _BatchedRequest(prompt, params, asyncio.get_running_loop().create_future())
        await self.open.wait()
        self._submit(request)
        try:
            finish_reason = await request.done
            return Completion(
                token_ids=request.token_ids,
                logprobs=request.logprobs,
                versions=request.versions,
                finish_reason=finish_reason,
                routes=await self._put_routes(request),
            )
        finally:
            self.requests.pop(request.id, None)
            if self._recorder is not None:
                self._recorder.forget(request.id)
            if request.done.cancelled():
                self.manager.cancel_request(request.id)
                self._cancelled.append(request.id)

    def lengths(self) -> list[int]:
        """Return each request's tokens, prompt and completion; callable from any thread."""
        return [
            len(request.prompt_ids) + len(request.token_ids)
            for request in list(self.requests.values())
        ]

    async def update(self, pairs: list[tuple[Tensor, Tensor]], version: PolicyVersion) -> None:
        """Copy new values into served tensors, given as ``(served, new)``, between two tokens."""
        if not self.can_pause:
            return await self._drain_and_load(pairs, version)
        restart = list(self.requests.values()) if self._recompute else []
        for request in restart:
            self.manager.cancel_request(request.id)
            self._cancelled.append(request.id)
        try:
            with self.manager.pause():
                # The manager is paused between two steps, and its last results are queued on this
                # event loop. Receive them first, so that each token gets the version that sampled
                # it.
                await asyncio.sleep(0)
                self._load(pairs, version)
                for request in restart:
                    if self.requests.pop(request.id, None) and not request.done.done():
                        self._submit(request)
                self._forget_cancelled()
        except Exception as error:
            for request in restart:  # cancelled above, so nothing else would answer them
                if not request.done.done():
                    request.done.set_exception(RuntimeError(f"the weight update failed: {error}"))
            raise

    async def fail_all(self, reason: str) -> None:
        """Fail the requests in flight."""
        for request in self.requests.values():
            if not request.done.done():
                request.done.set_exception(RuntimeError(reason))
        await asyncio.sleep(0)

    async def _put_routes(self, request: _BatchedRequest) -> tuple[str, ...]:
        """Store the routes of a completed request, if any are recorded; return references."""
        if self._recorder is None or self._routes is None or request.params.temperature == 0:
            return ()
        prompt_length = len(request.prompt_ids)
        start = request.params.routes_start
        end = prompt_length + len(request.token_ids) - 1  # the last token was not processed
        if start == end:
            return ()
        rows, versions = self._recorder.rows(request.id, start=start, end=end)
        put = partial(
            self._routes.put,
            rows,
            start=start,
            versions=versions,
            shared=max(0, prompt_length - 1 - start),
        )
        if is_instant(self._routes, end - start):
            return put()
        return await asyncio.to_thread(put)

    def _submit(self, request: _BatchedRequest) -> None:
        """Submit a request, with the tokens sampled so far, to the batching manager."""
        request.resumed_at = len(request.token_ids)
        earlier, request.id = request.id, f"primerl-{next(self._ids)}"
        self.requests[request.id] = request
        if self._recorder is not None and request.params.temperature > 0:
            self._recorder.begin(request.id, continues=earlier or None)
        self.manager.register_result_handler(request.id, self._receive)
        accepted = self.manager.add_request(
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
        """Receive the new tokens of a request; called after every token."""
        request = self.requests.get(output.request_id)
        if request is None or request.done.done():
            return
        fresh = slice(len(request.token_ids) - request.resumed_at, None)
        request.token_ids.extend(output.generated_tokens[fresh])
        request.logprobs.extend(output.logprobs[fresh])
        request.versions.extend([self.version] * len(output.generated_tokens[fresh]))
        if output.error is not None:
            self._failure = output.error
            request.done.set_exception(RuntimeError(f"generation failed: {output.error}"))
        elif output.is_finished():
            stopped = request.token_ids[-1] in request.params.stop_token_ids
            request.done.set_result("stop" if stopped else "length")

    async def _drain_and_load(self, pairs: list[tuple[Tensor, Tensor]], version: int) -> None:
        self.open.clear()
        try:
            while self.requests:
                waiting = [request.done for request in self.requests.values()]
                await asyncio.wait(waiting)
                await asyncio.sleep(0)  # lets finished requests leave self.requests
            self._load(pairs, version)
            self._forget_cancelled()
        finally:
            self.open.set()

    def _load(self, pairs: list[tuple[Tensor, Tensor]], version: int) -> None:
        with torch.no_grad():
            for served, new in pairs:
                served.copy_(new)
        self.version = version

    def _forget_cancelled(self) -> None:
        """Remove the handlers of cancelled requests, which get no last result."""
        handlers = self.manager.output_router.result_handlers
        for request_id in self._cancelled:
            handlers.pop(request_id, None)
        self._cancelled.clear()
