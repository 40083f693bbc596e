"""An engine in this process, which decodes with a transformers model."""

import asyncio
import copy
import logging
import operator
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from primerl._common.openmp import release_threads
from primerl._common.optional import require
from primerl.rollout.engines.protocol import RouteStore, is_instant
from primerl.rollout.engines.token_sequence import TokenSequence
from primerl.rollout.engines.transformers.cuda_graphs import DecodingGraphs
from primerl.rollout.engines.transformers.decoder import (
    Decoder,
    NextTokenLogits,
    find_shapes,
    without_traceback,
)
from primerl.rollout.engines.transformers.kv_cache import PagedCache, largest_window
from primerl.rollout.engines.transformers.model_attention import switch_to_pages
from primerl.rollout.engines.transformers.pages import (
    PAGE_TOKENS,
    CacheSize,
    PageTable,
    pages_of_span,
)
from primerl.rollout.engines.transformers.recurrent_states import (
    StateTable,
    round_decays,
    state_bytes,
)
from primerl.rollout.engines.transformers.routing import BatchRoutes, Capture, RequestRoutes
from primerl.rollout.engines.transformers.sampling import RequestKeys
from primerl.rollout.engines.transformers.scheduler import BatchedRequest
from primerl.rollout.engines.transformers.snapshots import SEGMENT_TOKENS
from primerl.rollout.engines.transformers.support import refuse_unsupported, rope_limit
from primerl.types import Completion, PolicyVersion, SamplingParams

log = logging.getLogger(__name__)

STOP_S = 30.0
# The least number of tokens that a forward pass may process.
STEP_TOKENS = 512
# The share of the free memory that the cache takes, unless its size is given. The rows of decoding
# requests can take twice as much again.
CACHE_SHARE = 0.15
# For each request that can be decoded, the rows for recurrent states: its own, and a snapshot.
STATE_ROWS = 2
# For each request that can be decoded, its window, and that of a request that has ended.
WINDOWS = 2
# The least memory that a token takes, if no layer keeps all keys and values.
BOOKKEEPING_BYTES = 64
# The bodies of ``update_in_place`` that the current task or thread is in.
_BODIES: ContextVar[tuple[object, ...]] = ContextVar("primerl_update_in_place", default=())


class TransformersEngine:
    """Serves a copy of a Hugging Face causal language model, on CPU or CUDA.

        with rollout.TransformersEngine(model) as engine:
            completion = await engine.generate(prompt_ids, SamplingParams(max_tokens=64))

    Every token carries its processed logprob and the version of the weights that sampled it.
    ``update_weights`` takes effect between two tokens, while requests are in flight:

    - ``on_update="recompute"``: the KV cache of requests in flight is recomputed with the new
      weights. Each token's logprob equals that of a plain forward pass of the token's version.
    - ``on_update="keep"``: the KV cache stays, so tokens sampled after an update attend to keys and
      values of older weights. This is cheaper, but the tokens are sampled from a policy that is
      slightly different from that of any version. (A request whose cache is evicted for lack of
      memory is recomputed with the weights of that moment.)

    Requests that begin alike share the keys and values of their first tokens until the next update.
    The turns of a conversation share them, too.

    The tokens that a request draws depend on ``seed``, its session and its prompt, and not on other
    requests: equal requests of the same session get different draws, in their order. In float32, on
    a CPU and one thread, dense models give the same tokens in any order of requests; otherwise a
    token changes only where rounding decides.

    ``generate`` may be awaited on any loop, and ``update_weights`` called from any thread.

    Args:
        model: a causal language model; it is copied, but for its weights with ``share_weights``.
        dtype: the dtype of the copy's parameters and KV cache, such as ``torch.bfloat16``; updates
            are rounded to it. None: the model's dtype.
        share_weights: serve the model's own weights instead of a copy. They may then change only
            within ``update_in_place``; the engine does not notice other changes.
        on_update: what an update does to requests in flight.
        max_concurrent: the maximum number of requests that are decoded together.
        cache_tokens: capacity of the KV cache, in tokens. None: as many as ``max_concurrent``
            requests can have, or as fit into 15% of the free memory. Layers with sliding windows
            keep fewer tokens; if all layers have windows, it is their capacity, and requests may
            have more tokens.
        version: the version of the model's weights: 0, or the step from which a run resumes.
        seed: the seed of all requests that have none of their own; None draws one.
        routes: the store for the expert routes of completions, for router replay. Greedy
            completions are not trained and have none.
        capture: ``replay.capture``, which records the routes.
        prepare: called with the copy before it serves, to change how it computes. Settings that are
            registered per module, such as the ``matmul`` of ``parallel.divide_experts``, are not
            copied with the model, so they must be applied here.
        cuda_graphs: on a GPU, whether decoding steps are captured as CUDA graphs; they never are if
            routes are recorded, or if the model's forward pass waits for values of tensors.

    Raises:
        ValueError: this engine does not support the model, an argument is of another kind or
            outside its range, only one of ``routes`` and ``capture`` is given, or weights in
            another dtype, or sharded weights, are to be shared.
        RuntimeError: inference mode is on, whose tensors can't be updated.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        share_weights: bool = False,
        on_update: Literal["recompute", "keep"] = "recompute",
        max_concurrent: int = 128,
        cache_tokens: int | None = None,
        version: PolicyVersion = 0,
        seed: int | None = None,
        routes: RouteStore | None = None,
        capture: Capture | None = None,
        prepare: Callable[[nn.Module], object] | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        require("transformers", extra="transformers")
        if on_update not in ("recompute", "keep"):
            raise ValueError(f"on_update={on_update!r}; expected 'recompute' or 'keep'")
        max_concurrent = _whole_number("max_concurrent", max_concurrent, least=1)
        if cache_tokens is not None:
            cache_tokens = _whole_number("cache_tokens", cache_tokens, least=2)
        version = _whole_number("version", version, least=0)
        seed = secrets.randbits(64) if seed is None else _whole_number("seed", seed)
        is_dtype = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if dtype is not None and not is_dtype:
            raise ValueError(
                f"dtype is {dtype!r}, expected a torch.dtype with floating point, such as "
                "torch.bfloat16"
            )
        if (routes is None) != (capture is None):
            raise ValueError(
                "expert routes need two arguments: routes=, a store such as replay.Store, and "
                "capture=replay.capture"
            )
        refuse_inference_mode()
        refuse_unsupported(model)
        served: Any = _copy_model(model, dtype=dtype, share_weights=share_weights)
        if prepare is not None:
            prepare(served)
        served.eval()
        switch_to_pages(served)
        if dtype is not None and not share_weights:
            _round_parameters(served, dtype)
            round_decays(served, dtype)
        self._model = served
        text: Any = served.config.get_text_config()
        self._vocab_size = int(text.vocab_size)
        self._positions = rope_limit(served.config)
        self._recompute = on_update == "recompute"
        self._max_concurrent = max_concurrent
        probe = find_shapes(served, positions=self._positions)
        self._shapes, self._state_examples = probe.shapes, probe.states
        self._limit_states()
        self._window = largest_window(self._shapes)
        self._cache_size = self._size(cache_tokens)
        self._keys = RequestKeys(seed)
        self._version = version
        self._failure: RuntimeError | None = None
        self._shares_weights = share_weights
        self._body: object | None = None
        self._was_closed = False
        self.routes = routes
        """The store of expert routes; None if routes are not recorded."""
        self._capture = capture
        self._recorder: BatchRoutes | None = None
        self._cuda_graphs = cuda_graphs
        self._decoder: Decoder | None = None

    @property
    def version(self) -> PolicyVersion:
        """The version of the weights that sample the next token."""
        return self._version if self._decoder is None else self._decoder.version

    @property
    def context_length(self) -> int:
        """The maximum number of tokens of one request: the smaller of positions and cache."""
        return min(self._positions or self._cache_size.tokens, self._cache_size.tokens)

    @property
    def vocab_size(self) -> int:
        """The number of token ids that the model has embeddings for."""
        return self._vocab_size

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the load under vLLM's metric names: running requests, waiting requests, cache use.

        The cache holds the tokens of all requests, in pages; requests that do not fit wait.

        Raises:
            RuntimeError: the engine is not running.
        """
        return {"this process": self._running().metrics()}

    def start(self) -> "TransformersEngine":
        """Start serving; ``with`` calls this, and closes the engine at its end.

        An engine that was closed can be started again: it serves the same weights and version.

        Raises:
            RuntimeError: the cache does not fit into memory, or the engine is already running.
        """
        refuse_inference_mode()
        if self._decoder is not None:
            raise RuntimeError("the engine is already running")
        states = None
        with ExitStack() as on_failure:
            if self._capture is not None:
                self._recorder = BatchRoutes(self._model, self._capture)
                on_failure.callback(self._recorder.close)
            size = self._cache_size
            try:
                cache = PagedCache(
                    self._shapes,
                    device=self._device(),
                    pages=size.pages,
                    windowed_pages=size.windowed_pages,
                )
                if self._state_examples:
                    rows = STATE_ROWS * self._max_concurrent
                    states = StateTable(self._state_examples, rows=rows)
            except (MemoryError, torch.OutOfMemoryError) as error:
                raise RuntimeError(
                    f"the engine did not start: a cache of {size.tokens} tokens does not "
                    "fit into memory; pass a smaller cache_tokens"
                ) from error
            on_failure.pop_all()
        model = NextTokenLogits(self._model)
        self._decoder = Decoder(
            model,
            cache,
            PageTable(size.pages, window=self._window, windowed_pages=size.windowed_pages),
            max_concurrent=self._max_concurrent,
            max_step_tokens=self._step_tokens(),
            recompute=self._recompute,
            version=self.version,
            failure=self._failure,
            routes=self._recorder,
            graphs=self._make_graphs(model, cache),
            states=states,
        )
        self._decoder.start()
        # The loop's thread keeps the decoder alive, but not an engine that nobody closed.
        weakref.finalize(self, self._decoder.stop)
        return self

    def close(self) -> None:
        """Stop serving; requests in flight fail. ``start`` serves again.

        Raises:
            RuntimeError: it is called within ``update_in_place``.
        """
        self._refuse_within_body("close")
        decoder, self._decoder = self._decoder, None
        if decoder is None:
            return
        self._was_closed = True
        decoder.close(STOP_S)
        self._version, self._failure = decoder.version, decoder.failure
        if self._recorder is not None:
            self._recorder.close()

    def __enter__(self) -> "TransformersEngine":
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
    ) -> Completion:
        """Sample one completion; cancelling the awaiting task cancels the request.

        ``temperature=0`` is greedy, with a processed logprob of 0. With ``seed``, the completion
        depends on the prompt, the weights and ``seed`` only. This holds for dense models in
        float32, on a CPU and one thread; otherwise, a token can also depend on other requests where
        rounding decides between two tokens.

        Raises:
            ValueError: the prompt is not a sequence of the model's token ids, or the request
                exceeds the context.
            RuntimeError: the engine is not running, generation failed, or the request is awaited
                within ``update_in_place``.
        """
        prompt = _token_ids(prompt_ids)
        self._check(prompt, params)
        self._refuse_within_body("generate")
        decoder = self._running()
        recorded = self.routes is not None and params.temperature > 0
        request = BatchedRequest(
            tokens=prompt,
            prompt_length=len(prompt),
            params=params,
            randomness=self._keys.key(prompt, params, session),
            routes=RequestRoutes() if recorded else None,
        )
        decoder.submit(request)
        release_threads()  # this thread may have computed before; now it waits
        finish_reason = await asyncio.wrap_future(request.done)
        return Completion(
            token_ids=request.tokens[request.prompt_length :],
            logprobs=request.logprobs,
            versions=request.versions,
            finish_reason=finish_reason,
            routes=await self._put_routes(request),
        )

    def update_weights(
        self, tensors: Mapping[str, Tensor], *, version: int, timeout_s: float = 600.0
    ) -> None:
        """Load new weights, which sample from the next token on; return when they are loaded.

        Args:
            tensors: the model's parameters and saved buffers by name; a shared tensor needs only
                one of its names.
            version: the policy version of the weights; the version that is served may be loaded
                again.
            timeout_s: how long loading may take.

        Raises:
            ValueError: names, shapes or kinds of numbers are not the model's, or the version is
                older than the one served. The weights are unchanged.
            RuntimeError: it took longer than ``timeout_s``, or it is called within
                ``update_in_place``.
        """
        refuse_inference_mode()
        self._refuse_within_body("update_weights")
        version = self._not_older(version)
        pairs = _match_tensors(self._model, tensors)
        future = self._running().update(partial(_copy_tensors, pairs), version)
        try:
            future.result(timeout_s)
        except TimeoutError:
            if future.done():  # loading raised it
                raise
            waits = future.cancel()
            effect = "has not begun, and will not" if waits else "has begun, and will still"
            raise RuntimeError(
                f"the weight update took longer than {timeout_s:g} s; loading {effect} take effect"
            ) from None

    @contextmanager
    def update_in_place(self, *, version: int, timeout_s: float = 600.0) -> Iterator[None]:
        """Let the body change shared weights, while the engine waits between two steps.

            with engine.update_in_place(version=step + 1):
                optimizer.step()

        Args:
            version: the policy version of the changed weights.
            timeout_s: how long to wait for the engine's current step.

        Raises:
            ValueError: the engine was made without ``share_weights=True``, or the version is older
                than the one served.
            RuntimeError: the engine did not reach the end of its step within ``timeout_s``, or the
                call is within another one.
        """
        if not self._shares_weights:
            raise ValueError(
                "update_in_place changes shared weights, but this engine serves a copy; make it "
                "with share_weights=True, or publish the weights (update_weights)"
            )
        self._refuse_within_body("update_in_place")
        version = self._not_older(version)
        waiting, changed = threading.Event(), threading.Event()
        failure: BaseException | None = None

        def wait() -> None:
            waiting.set()
            changed.wait()
            if failure is not None:
                raise failure

        future = self._running().update(wait, version)
        future.add_done_callback(lambda _: waiting.set())  # the engine was closed, or refused it
        if not waiting.wait(timeout_s) and future.cancel():
            raise RuntimeError(f"the engine's step took longer than {timeout_s:g} s")
        if future.done():
            future.result()
        self._body = body = object()
        _BODIES.set((*_BODIES.get(), body))
        try:
            yield
        except BaseException as error:
            failure = without_traceback(error)
            raise
        finally:
            self._body = None
            _BODIES.set(tuple(other for other in _BODIES.get() if other is not body))
            changed.set()
        future.result(timeout_s)

    def _refuse_within_body(self, name: str) -> None:
        """Raise a RuntimeError for a call that would wait for the body that it is made in."""
        if self._body is not None and self._body in _BODIES.get():
            raise RuntimeError(
                f"{name} was called within update_in_place, while the engine waits for the end of "
                "that with statement; call it afterwards"
            )

    def _not_older(self, version: PolicyVersion) -> PolicyVersion:
        version = _whole_number("version", version, least=0)
        if version < self.version:
            raise ValueError(f"version {version} is older than {self.version}, which is served")
        return version

    def _make_graphs(self, model: NextTokenLogits, cache: PagedCache) -> DecodingGraphs | None:
        if not self._cuda_graphs or cache.device.type != "cuda" or self.routes is not None:
            return None
        if self._state_examples:
            log.info("the model is decoded without CUDA graphs: it has recurrent states")
            return None
        graphs = DecodingGraphs(model, cache)
        if obstacle := graphs.obstacle():
            log.info("the model is decoded without CUDA graphs: %s", obstacle)
            return None
        return graphs

    async def _put_routes(self, request: BatchedRequest) -> tuple[str, ...]:
        """Store the routes of a completed request, if any are recorded; return references."""
        start, end = request.params.routes_start, len(request.tokens) - 1
        if self.routes is None or request.routes is None or start == end:
            return ()  # the last token was not processed
        rows, versions = request.routes.between(start, end)
        put = partial(
            self.routes.put,
            rows,
            start=start,
            versions=versions,
            shared=max(0, request.prompt_length - 1 - start),
        )
        if is_instant(self.routes, end - start):
            return put()
        return await asyncio.to_thread(put)

    def _size(self, cache_tokens: int | None) -> CacheSize:
        """Return the size of the cache: as given, or what fits, or what all requests can have."""
        full = sum(shape.token_bytes for shape in self._shapes if shape.window is None)
        windowed = sum(shape.token_bytes for shape in self._shapes if shape.window is not None)
        states = self._max_concurrent * STATE_ROWS * state_bytes(self._state_examples)
        free = self._cache_bytes() - states
        if self._window is None:
            return CacheSize(cache_tokens or self._most_tokens(free, full))
        windows = self._windows_tokens(self._window)
        if full:
            together = self._most_tokens(free, full + windowed)
            alone = self._most_tokens(free - windows * windowed, full)
            tokens = cache_tokens or max(together, alone)
            return CacheSize(tokens, min(tokens, windows))
        known = self._most_tokens(free // 2, 0)
        left = free - known * BOOKKEEPING_BYTES
        windows = cache_tokens or min(windows, self._most_tokens(left, windowed))
        step = pages_of_span(self._step_tokens()) + pages_of_span(self._window)
        fits = windows >= step * PAGE_TOKENS
        return CacheSize(known if fits else windows, windows)

    def _most_tokens(self, free: int, token_bytes: int) -> int:
        """Return how many tokens fit into memory, or all requests together can have."""
        fit = max(PAGE_TOKENS, free // max(BOOKKEEPING_BYTES, token_bytes))
        return min(fit, self._max_concurrent * (self._positions or fit))

    def _windows_tokens(self, window: int) -> int:
        """Return how many tokens layers with windows keep, if there is enough memory.

        A request also needs a page to begin, and a step the pages that it fills.
        """
        each = pages_of_span(window) + 1
        pages = WINDOWS * self._max_concurrent * each + pages_of_span(self._step_tokens())
        return pages * PAGE_TOKENS

    def _limit_states(self) -> None:
        """Decode fewer requests together if their states would take most of the cache's memory."""
        each = STATE_ROWS * state_bytes(self._state_examples)
        fit = max(1, self._cache_bytes() // 2 // each) if each else self._max_concurrent
        if fit < self._max_concurrent:
            log.warning(
                "at most %d requests are decoded together instead of %d: the recurrent states of "
                "one, and of a snapshot, take %d bytes",
                *(fit, self._max_concurrent, each),
            )
            self._max_concurrent = fit

    def _cache_bytes(self) -> int:
        """Return how much memory the cache may take."""
        return int(CACHE_SHARE * free_memory(self._device()))

    def _device(self) -> torch.device:
        device: torch.device = next(self._model.parameters()).device
        return device

    def _step_tokens(self) -> int:
        """Return how many tokens a forward pass may process: with states, a whole segment too."""
        if self._state_examples:
            return SEGMENT_TOKENS + self._max_concurrent
        return max(STEP_TOKENS, self._max_concurrent)

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        if not prompt:
            raise ValueError("the prompt is empty; expected at least one token")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise ValueError(
                f"the prompt has a token outside the model's vocabulary of {self.vocab_size}; "
                "check that the tokenizer belongs to the model"
            )
        if len(prompt) + params.max_tokens > self.context_length:
            by_cache = self.context_length != self._positions
            limit = "the KV cache (cache_tokens)" if by_cache else "the model's positions"
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and max_tokens={params.max_tokens} exceed the "
                f"context of {self.context_length} tokens, the limit of {limit}"
            )
        if self.routes is not None and params.routes_start > len(prompt):
            raise ValueError(
                f"routes_start is {params.routes_start}, beyond the prompt of {len(prompt)} tokens"
            )

    def _running(self) -> Decoder:
        if self._decoder is None and self._was_closed:
            raise RuntimeError("the engine was closed; engine.start() serves again")
        if self._decoder is None:
            raise RuntimeError(
                "the engine is not running; use `with TransformersEngine(...) as engine`"
            )
        return self._decoder


def _whole_number(name: str, value: Any, *, least: int | None = None) -> int:
    expected = "a whole number" if least is None else f"a whole number of at least {least}"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        raise ValueError(f"{name} is {value!r:.80}, expected {expected}")
    return number


def _token_ids(prompt_ids: Iterable[Any]) -> list[int]:
    if isinstance(prompt_ids, TokenSequence):
        return prompt_ids[:]
    try:
        return [operator.index(token) for token in prompt_ids]
    except TypeError:
        raise ValueError(
            f"the prompt is {prompt_ids!r:.80}; expected a sequence of token ids (whole numbers), "
            "such as tokenizer.encode(text)"
        ) from None


def refuse_inference_mode() -> None:
    """Raise a RuntimeError under ``torch.inference_mode``, whose tensors can't be updated."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "TransformersEngine cannot run under torch.inference_mode, whose tensors can't be "
            "updated in place; leave it, or use torch.no_grad"
        )


def free_memory(device: torch.device) -> int:
    """Return how many bytes of the device's memory are free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(require("psutil", extra="transformers").virtual_memory().available)


def _copy_tensors(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy new values into served tensors, given as ``(served, new)``."""
    with torch.no_grad():
        for served, new in pairs:
            served.copy_(new)


def _copy_model(model: nn.Module, *, dtype: torch.dtype | None, share_weights: bool) -> nn.Module:
    """Copy a model; its tensors too, unless they are shared.

    Raises:
        ValueError: the weights are to be shared, but have another dtype or are sharded.
    """
    if not share_weights:
        copied = copy.deepcopy(model).requires_grad_(False)
        copied.zero_grad()
        return copied
    tensors = [*model.parameters(), *model.buffers()]
    if dtype not in (None, *(parameter.dtype for parameter in model.parameters())):
        raise ValueError(f"weights can't be shared in {dtype}; leave out dtype or share_weights")
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        raise ValueError("sharded weights can't be shared; leave out share_weights")
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _round_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert parameters in place; buffers, such as rotary frequencies, keep their precision."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _match_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pair each served tensor with its new value: ``(served, new)``.

    The names are those of ``model.state_dict()``: parameters and saved buffers. A tensor with two
    names needs only one of them.

    Raises:
        ValueError: a name is unknown, a shape or the kind of numbers differs, or a tensor is
            missing or has no values.
    """
    served = model.state_dict()
    pairs, covered = [], set()
    for name, new in tensors.items():
        if name not in served or served[name].shape != new.shape:
            expected = tuple(served[name].shape) if name in served else "no such tensor"
            raise ValueError(
                f"weights for {name!r} have shape {tuple(new.shape)}; the served model has "
                f"{expected}"
            )
        if new.is_meta or new.is_floating_point() != served[name].is_floating_point():
            kind = "no values" if new.is_meta else f"the dtype {new.dtype}"
            raise ValueError(
                f"weights for {name!r} have {kind}; the served model has {served[name].dtype}"
            )
        covered.add(served[name].data_ptr())
        pairs.append((served[name], new))
    missing = [name for name, tensor in served.items() if tensor.data_ptr() not in covered]
    if missing:
        raise ValueError(
            f"no weights were given for {', '.join(missing[:5])} ({len(missing)} tensors)"
        )
    return pairs
