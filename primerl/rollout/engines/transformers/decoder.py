"""The loop of the embedded engine: one forward pass after another, with updates in between."""

import copy
import inspect
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from primerl._common.openmp import release_threads
from primerl.rollout.engines.transformers.attention_scores import LEAST_ROWS
from primerl.rollout.engines.transformers.attention_step import (
    AttentionStep,
    DecodingInPages,
    DecodingInRows,
    Part,
    PromptChunk,
)
from primerl.rollout.engines.transformers.cuda_graphs import CaptureFailed, DecodingGraphs
from primerl.rollout.engines.transformers.kv_cache import DecodingBatch, PagedCache
from primerl.rollout.engines.transformers.model_attention import ShapeProbe, attending
from primerl.rollout.engines.transformers.pages import PAGE_TOKENS, PageTable
from primerl.rollout.engines.transformers.recurrent_states import StateStep, StateTable
from primerl.rollout.engines.transformers.routing import BatchRoutes, write_routes
from primerl.rollout.engines.transformers.sampling import sample_tokens, uniform
from primerl.rollout.engines.transformers.scheduler import (
    BatchedRequest,
    Chunk,
    NextStep,
    Scheduler,
)
from primerl.rollout.engines.transformers.snapshots import StateRows
from primerl.rollout.engines.transformers.transfers import to_device
from primerl.rollout.errors import summary
from primerl.types import PolicyVersion

log = logging.getLogger(__name__)


class Decoder:
    """Samples with a model; requests, cancellations and updates may come from any thread.

    Args:
        model: the serving model, whose attention is ``switch_to_pages``'s, as ``NextTokenLogits``.
        cache: the pages.
        max_concurrent: how many requests are decoded together.
        max_step_tokens: how many tokens are processed in a forward pass.
        recompute: whether an update recomputes the keys and values of requests in flight.
        version: the version of the weights.
        failure: the error of an update of an earlier decoder, if it failed.
        routes: the expert routes of forward passes, if they are recorded.
        graphs: the decoding steps as CUDA graphs, if they are used.
        states: the recurrent states, if the model has such states.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: PagedCache,
        pages: PageTable,
        *,
        max_concurrent: int,
        max_step_tokens: int,
        recompute: bool,
        version: PolicyVersion,
        failure: RuntimeError | None = None,
        routes: BatchRoutes | None = None,
        graphs: DecodingGraphs | None = None,
        states: StateTable | None = None,
    ) -> None:
        self.version = version
        self.failure = failure
        """The error of a failed update: it may have changed some weights, so none are used."""
        self._model = model
        self._cache = cache
        self._states = states
        self._scheduler = Scheduler(
            pages,
            max_concurrent=max_concurrent,
            max_step_tokens=max_step_tokens,
            states=None if states is None else StateRows(states.rows),
        )
        self._batch = DecodingBatch(cache)
        self._recompute = recompute
        self._routes = routes
        self._graphs = graphs
        self._sampled_tokens = 0
        self._inbox: deque[BatchedRequest] = deque()
        self._updates: deque[tuple[Callable[[], None], PolicyVersion, Future[None]]] = deque()
        self._cancelled: deque[BatchedRequest] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="primerl-engine", daemon=True)

    def start(self) -> None:
        """Start the loop."""
        self._thread.start()

    def submit(self, request: BatchedRequest) -> None:
        """Add a request; cancelling its ``done`` removes it.

        Raises:
            RuntimeError: the engine is closed.
        """
        self._require_thread()
        with self._changed:
            if self._closed:
                raise RuntimeError("the engine was closed")
            self._inbox.append(request)
            self._changed.notify()
        request.done.add_done_callback(lambda done: self._note_cancelled(request, done))

    def update(self, load: Callable[[], None], version: PolicyVersion) -> "Future[None]":
        """Have ``load`` called between two steps; the returned future waits for it."""
        self._require_thread()
        done: Future[None] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the engine was closed")
            self._updates.append((load, version, done))
            self._changed.notify()
        return done

    def stop(self) -> None:
        """Have the loop end after its current step."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """End the loop, and fail the requests in flight."""
        self.stop()
        self._thread.join(timeout_s)

    def metrics(self) -> dict[str, float]:
        """Return the load under vLLM's metric names."""
        scheduler = self._scheduler
        waiting = len(scheduler.waiting) + len(self._inbox)
        return {
            "vllm:num_requests_running": float(len(scheduler.running)),
            "vllm:num_requests_waiting": float(waiting),
            "vllm:kv_cache_usage_perc": scheduler.pages.usage,
            "vllm:prompt_tokens_total": float(scheduler.queried_tokens),
            "vllm:prefix_cache_queries_total": float(scheduler.queried_tokens),
            "vllm:prefix_cache_hits_total": float(scheduler.reused_tokens),
            "vllm:generation_tokens_total": float(self._sampled_tokens),
            "vllm:num_preemptions_total": float(scheduler.preemptions),
        }

    def _require_thread(self) -> None:
        if not self._thread.is_alive():  # also in a process that was forked from the engine's
            raise RuntimeError("the engine's loop does not run in this process, or has ended")

    def _note_cancelled(self, request: BatchedRequest, done: "Future[str]") -> None:
        if done.cancelled():
            with self._changed:
                self._cancelled.append(request)
                self._changed.notify()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # a fault of this module: nobody may wait for ever
            log.exception("the embedded engine's loop ended")
            with self._changed:
                self._closed = True
                self._scheduler.waiting.extend(self._inbox)
                updates = list(self._updates)
            reason = f"the engine's loop ended: {error}"
            for request in [*self._scheduler.running, *self._scheduler.waiting]:
                _fail(request.done, reason, error)
            for _, _, done in updates:
                _fail(done, reason, error)

    def _serve(self) -> None:
        scheduler = self._scheduler
        while True:
            with self._changed:
                if not (scheduler.running or scheduler.waiting):
                    self._batch.clear()
                    release_threads()
                    self._changed.wait_for(self._has_messages)
                scheduler.waiting.extend(self._inbox)
                self._inbox.clear()
                cancelled, updates = list(self._cancelled), list(self._updates)
                self._cancelled.clear()
                self._updates.clear()
                closed = self._closed
            for request in cancelled:
                scheduler.finish(request)
            if closed:
                break
            for load, version, done in updates:
                self._load(load, version, done)
            if scheduler.running or scheduler.waiting:
                self._step()
        self._fail_all("the engine was closed")
        for _, _, done in updates:
            _fail(done, "the engine was closed")

    def _has_messages(self) -> bool:
        return bool(self._closed or self._inbox or self._updates or self._cancelled)

    def _load(self, load: Callable[[], None], version: PolicyVersion, done: "Future[None]") -> None:
        if not done.set_running_or_notify_cancel():
            return
        if version < self.version:  # another thread's update was faster
            reason = f"version {version} is older than {self.version}, which is served"
            done.set_exception(ValueError(reason))
            return
        try:
            load()
        except BaseException as error:  # every kind: the caller of the update gets it
            self.failure = _failed_update(error, version)
            self._fail_all(str(self.failure), self.failure.__cause__)
            done.set_exception(error)
            return
        self.failure = None
        self.version = version
        if self._graphs is not None:
            self._graphs.forget_moved()
        if self._recompute:
            self._scheduler.recompute_all()
            self._batch.clear()
        else:
            self._scheduler.forget_prefixes()
        done.set_result(None)

    def _step(self) -> None:
        if self.failure is not None:
            self._fail_all(str(self.failure), self.failure.__cause__)
            return
        plan = self._scheduler.plan()
        if self._states is not None:
            self._states.copy(plan.state_copies)
        chunks = plan.all_chunks
        if not chunks:
            return
        try:
            self._compute(plan)
        except Exception as error:  # every kind: the requests of the step get it
            log.exception("the embedded engine's forward pass failed")
            self._batch.clear()
            self._fail([chunk.request for chunk in chunks], f"generation failed: {error}", error)

    def _compute(self, plan: NextStep) -> None:
        """Process the tokens of ``plan``, and sample where a request's last token was processed."""
        try:
            self._cache.erase(plan.reallocated, plan.reallocated_windows)
            self._cache.copy(plan.copies)
        finally:
            self._scheduler.release_sources(plan)
        if (logits := self._from_graph(plan)) is not None:
            self._scheduler.advance(plan)
            self._sample(logits, plan.decoding)
            return
        parts, decoding = self._decoding_parts(plan.decoding)
        parts += [PromptChunk(self._cache, chunk) for chunk in plan.chunks]
        chunks = [Chunk(request, 1) for request in decoding] + plan.chunks
        ends = [index for index, chunk in enumerate(chunks) if chunk.is_last]
        states = None if self._states is None else StateStep(self._states, chunks)
        step = AttentionStep(self._cache, *self._slots(chunks), parts, chunks, states)
        logits = self._forward(chunks, step, ends)
        if self._routes is not None:
            self._record(plan, chunks, self._routes)
        self._scheduler.advance(plan)
        if ends:
            self._sample(logits, [chunks[index].request for index in ends])

    def _from_graph(self, plan: NextStep) -> Tensor | None:
        """Return the logits after a step that only decodes, if there are graphs for it."""
        if self._graphs is None or plan.chunks:
            return None
        try:
            with torch.inference_mode():
                return self._graphs.logits(plan.decoding)
        except CaptureFailed as failed:
            log.warning("the embedded engine goes on without CUDA graphs: %s", failed)
            self._graphs = None
            return None

    def _decoding_parts(
        self, requests: list[BatchedRequest]
    ) -> tuple[list[Part], list[BatchedRequest]]:
        """Return the parts of decoding requests, and the requests in the order of the parts.

        On a CPU, rows save copying pages in each step; on a GPU, moving rows would cost more.
        """
        if not requests:
            return [], []
        if self._cache.device.type == "cpu":
            rows = self._batch.arrange(requests)
            ordered = [request for group in rows for request in group.requests]
            return [DecodingInRows(group) for group in rows], ordered
        part = DecodingInPages.of(self._cache, requests)
        return [part], requests

    def _forward(self, chunks: Sequence[Chunk], step: AttentionStep, ends: list[int]) -> Tensor:
        """Return the logits after the last token of each chunk in ``ends``, float32."""
        tokens: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for chunk in chunks:
            first = chunk.request.computed
            tokens += chunk.request.tokens[first : first + chunk.count]
            positions += range(first, first + chunk.count)
            last.append(len(tokens) - 1)
        missing = max(0, LEAST_ROWS - len(tokens))
        tokens += [0] * missing
        positions += [0] * missing
        wanted = [last[index] for index in ends] or [0]
        wanted += wanted[-1:] * max(0, LEAST_ROWS - len(wanted))
        with torch.inference_mode(), attending(step):
            inputs = self._tensor([tokens]), self._tensor([positions]), self._tensor(wanted)
            logits: Tensor = self._model(*inputs)
            return logits

    def _sample(self, logits: Tensor, requests: Sequence[BatchedRequest]) -> None:
        padding = [requests[-1]] * (len(logits) - len(requests))
        uniforms = [
            uniform(request.randomness, len(request.tokens)) for request in [*requests, *padding]
        ]
        tokens, logprobs = sample_tokens(
            logits,
            [request.params for request in [*requests, *padding]],
            to_device(uniforms, torch.float64, self._cache.device),
        )
        # One transfer for both: float64 holds each token and each logprob exactly.
        results = torch.stack([tokens.double(), logprobs.double()], dim=1).tolist()
        for request, (id_, logprob) in zip(requests, results, strict=False):
            token = int(id_)
            if math.isnan(logprob):
                at = len(request.tokens) - request.prompt_length
                self._batch.clear()  # rows with broken numbers would spoil others
                self._fail([request], f"generation failed: {_not_numbers(at, self.version)}")
                continue
            self._sampled_tokens += 1
            request.tokens.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self.version)
            stopped = token in request.params.stop_token_ids
            if stopped or len(request.logprobs) == request.params.max_tokens:
                self._scheduler.finish(request)
                if request.done.set_running_or_notify_cancel():
                    request.done.set_result("stop" if stopped else "length")

    def _record(self, plan: NextStep, chunks: Sequence[Chunk], routes: BatchRoutes) -> None:
        """Store the experts of the step's tokens with the pages, and with the requests."""
        rows = routes.rows()
        for shared in plan.copies:
            assert shared.source.routes is not None
            experts, versions = shared.source.routes
            write_routes(shared.target, experts[: shared.tokens], 0, versions[: shared.tokens])
        row = 0
        for chunk in chunks:
            position = chunk.request.computed
            end = position + chunk.count
            while position < end:
                first = position % PAGE_TOKENS
                count = min(PAGE_TOKENS - first, end - position)
                page = chunk.request.pages[position // PAGE_TOKENS]
                write_routes(page, rows[row : row + count], first, self.version)
                position += count
                row += count
        for chunk in chunks:
            if chunk.request.routes is not None:
                chunk.request.routes.read(chunk.request.pages, chunk.request.computed + chunk.count)

    def _slots(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
        """Return where the keys and values of the tokens go, also in layers with windows."""
        places = [
            (chunk.request, position)
            for chunk in chunks
            for position in range(chunk.request.computed, chunk.request.computed + chunk.count)
        ]
        slots = self._tensor([request.slot(position) for request, position in places])
        if self._cache.window is None:
            return slots, slots
        return slots, self._tensor([request.window_slot(position) for request, position in places])

    def _tensor(self, values: Any) -> Tensor:
        return to_device(values, torch.int64, self._cache.device)

    def _fail_all(self, reason: str, cause: BaseException | None = None) -> None:
        self._fail([*self._scheduler.running, *self._scheduler.waiting], reason, cause)
        self._scheduler.waiting.clear()
        self._scheduler.recompute_all()
        self._batch.clear()

    def _fail(
        self,
        requests: Sequence[BatchedRequest],
        reason: str,
        cause: BaseException | None = None,
    ) -> None:
        for request in requests:
            _fail(request.done, reason, cause)
            self._scheduler.finish(request, keep=False)


def without_traceback(error: BaseException) -> BaseException:
    """Copy an error, but not its traceback, whose frames would keep tensors and engines alive."""
    try:
        return copy.copy(error)
    except Exception:  # every kind: a class of errors need not be made for copying
        return RuntimeError(summary(error))


def _failed_update(error: BaseException, version: PolicyVersion) -> RuntimeError:
    failure = RuntimeError(
        f"the weight update to version {version} failed: {summary(error)}. Some weights may have "
        "changed, so no request is served until update_weights or update_in_place succeeds"
    )
    failure.__cause__ = without_traceback(error)
    return failure


def _not_numbers(at: int, version: PolicyVersion) -> str:
    return (
        f"the logits of token {at} are not numbers under the weights of version {version}. Either "
        "the weights hold NaN or infinity, as after a training step that diverged, or the numbers "
        "of the forward pass are too large for the dtype, as in float16"
    )


def _fail(done: "Future[Any]", reason: str, cause: BaseException | None = None) -> None:
    if not done.done() and done.set_running_or_notify_cancel():
        error = RuntimeError(reason)
        error.__cause__ = cause
        done.set_exception(error)


class NextTokenLogits(nn.Module):
    """A causal language model, as a function from tokens to the logits after the wanted ones."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(
        self,
        token_ids: Int[Tensor, "1 t"],
        position_ids: Int[Tensor, "1 t"],
        wanted: Int[Tensor, " n"],
    ) -> Float[Tensor, "n vocab"]:
        """Return the logits of the rows ``wanted``, float32."""
        if not self._keeps_logits:
            output = self.model(input_ids=token_ids, position_ids=position_ids, use_cache=False)
            return output.logits[0, wanted].float()  # type: ignore[no-any-return]
        output = self.model(
            input_ids=token_ids,
            position_ids=position_ids,
            logits_to_keep=wanted,
            use_cache=False,
        )
        return output.logits[0].float()  # type: ignore[no-any-return]


def find_shapes(model: nn.Module, *, positions: int | None = None) -> ShapeProbe:
    """Find the shapes of the keys and values of each layer, by a forward pass of a few tokens.

    Args:
        model: the serving model.
        positions: how many tokens a request can have; a window of as many is none.
    """
    probe = ShapeProbe(positions)
    device = next(model.parameters()).device
    tokens = torch.zeros(1, LEAST_ROWS, dtype=torch.int64, device=device)
    places = torch.arange(LEAST_ROWS, device=device).unsqueeze(0)
    with torch.no_grad(), attending(probe):
        model(input_ids=tokens, position_ids=places, use_cache=False)
    return probe
