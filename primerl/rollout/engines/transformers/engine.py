"""An engine in this process: transformers' continuous batching, with in-flight weight updates."""

import asyncio
import bisect
import copy
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn

from primerl._common.optional import require
from primerl.rollout.engines.protocol import RouteStore
from primerl.rollout.engines.transformers.batcher import Batcher
from primerl.rollout.engines.transformers.continuous_batching import (
    PAGE_TOKENS,
    STOP_S,
    refuse_inference_mode,
    refuse_unsupported,
    start_batching,
    stop_batching,
)
from primerl.rollout.engines.transformers.routing import BatchRoutes, Capture
from primerl.rollout.processes.background_loop import BackgroundLoop
from primerl.types import Completion, PolicyVersion, SamplingParams


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

    Prefixes are never shared between requests, because a shared block would survive an update.
    Before transformers 5.19, batching can't be paused: an update waits until the requests in flight
    have finished, while new ones wait for the update, so the two modes do the same.

    All state belongs to the engine's own event loop, so ``generate`` may be awaited on any loop and
    ``update_weights`` called from any thread.

    Args:
        model: a causal language model with full or sliding attention; it is copied.
        dtype: the dtype of the copy's parameters and KV cache, such as ``torch.bfloat16``; updates
            are rounded to it. None: the model's dtype.
        on_update: what an update does to requests in flight.
        max_concurrent: the maximum number of requests that are decoded together.
        cache_tokens: capacity of the KV cache, in tokens.
        version: the version of the model's weights: 0, or the step from which a run resumes.
        seed: the seed of the process's random generator. The requests in flight share the
            generator, so their samples depend on how they are batched.
        routes: the store for the expert routes of completions, for router replay. Greedy
            completions are not trained and have none.
        capture: ``replay.capture``, which records the routes.
        prepare: called with the copy before it serves, to change how it computes. Settings that are
            registered per module, such as the ``matmul`` of ``parallel.divide_experts``, are not
            copied with the model, so they must be applied here.

    Raises:
        ValueError: continuous batching does not support this model, or only one of ``routes`` and
            ``capture`` is given.
        RuntimeError: inference mode is on, whose tensors can't be updated.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        on_update: Literal["recompute", "keep"] = "recompute",
        max_concurrent: int = 128,
        cache_tokens: int = 16_384,
        version: PolicyVersion = 0,
        seed: int | None = None,
        routes: RouteStore | None = None,
        capture: Capture | None = None,
        prepare: Callable[[nn.Module], object] | None = None,
    ) -> None:
        require("transformers", extra="transformers")
        if on_update not in ("recompute", "keep"):
            raise ValueError(f"on_update={on_update!r}; expected 'recompute' or 'keep'")
        if (routes is None) != (capture is None):
            raise ValueError(
                "expert routes need two arguments: routes=, a store such as replay.Store, and "
                "capture=replay.capture"
            )
        refuse_inference_mode()
        refuse_unsupported(model)
        served: Any = copy.deepcopy(model).requires_grad_(False)
        served.zero_grad()
        if prepare is not None:
            prepare(served)
        served.set_attn_implementation("sdpa")
        if dtype is not None:
            _round_parameters(served, dtype)
        self._model = served
        text: Any = served.config.get_text_config()
        self._vocab_size = int(text.vocab_size)
        self._positions = int(text.max_position_embeddings)
        self._recompute = on_update == "recompute"
        self._cache_tokens = cache_tokens
        self._max_concurrent = max_concurrent
        self._start_batching = functools.partial(
            start_batching,
            served,
            max_concurrent=max_concurrent,
            cache_tokens=cache_tokens,
            seed=seed,
        )
        self._version = version
        self.routes = routes
        """The store of expert routes; None if routes are not recorded."""
        self._capture = capture
        self._recorder: BatchRoutes | None = None
        self._batcher: Batcher | None = None
        self._loop: BackgroundLoop | None = None

    @property
    def version(self) -> PolicyVersion:
        """The version of the weights that sample the next token."""
        return self._version if self._batcher is None else self._batcher.version

    @property
    def context_length(self) -> int:
        """The maximum number of tokens of one request: the smaller of positions and cache."""
        return min(self._positions, self._cache_tokens)

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
        batcher, _ = self._running()
        lengths = batcher.lengths()
        pages = [math.ceil(length / PAGE_TOKENS) for length in lengths]
        held = list(itertools.accumulate(pages))[: self._max_concurrent]
        capacity = self._cache_tokens / PAGE_TOKENS
        running = bisect.bisect_right(held, capacity)
        load = {
            "vllm:num_requests_running": float(running),
            "vllm:num_requests_waiting": float(len(lengths) - running),
            "vllm:kv_cache_usage_perc": min(1.0, sum(pages) / capacity),
        }
        return {"this process": load}

    def start(self) -> "TransformersEngine":
        """Start serving; ``with`` calls this, and closes the engine at its end."""
        refuse_inference_mode()
        with ExitStack() as on_failure:
            if self._capture is not None:  # first: if it refuses the model, no thread has started
                self._recorder = BatchRoutes(self._model, self._capture)
                on_failure.callback(self._recorder.close)
            manager = self._start_batching()
            on_failure.pop_all()
        self._batcher = Batcher(
            manager,
            recompute=self._recompute,
            version=self.version,
            recorder=self._recorder,
            routes=self.routes,
        )
        self._loop = BackgroundLoop("primerl-engine")
        return self

    def close(self) -> None:
        """Stop serving; requests in flight fail."""
        loop, self._loop = self._loop, None
        if loop is None or self._batcher is None:
            return
        stop_batching(self._batcher.manager)
        loop.submit(self._batcher.fail_all("the engine was closed")).result(STOP_S)
        if self._recorder is not None:
            self._recorder.close()
        loop.stop()

    def __enter__(self) -> "TransformersEngine":
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,  # noqa: ARG002  there is one server
    ) -> Completion:
        """Sample one completion; cancelling the awaiting task cancels the request.

        ``temperature=0`` is greedy, with a processed logprob of 0.

        Raises:
            ValueError: the request exceeds the context, or needs what this engine does not support
                (``top_p``, ``top_k``, a seed per request).
            RuntimeError: the engine is not running, or generation failed.
        """
        prompt = [int(token) for token in prompt_ids]
        self._check(prompt, params)
        batcher, loop = self._running()
        return await asyncio.wrap_future(loop.submit(batcher.generate(prompt, params)))

    def update_weights(
        self, tensors: Mapping[str, Tensor], *, version: int, timeout_s: float = 600.0
    ) -> None:
        """Load new weights, which sample from the next token on; return when they are loaded.

        Args:
            tensors: the model's parameters and saved buffers by name; a shared tensor needs only
                one of its names.
            version: the policy version of the weights.
            timeout_s: how long pausing and loading may take.

        Raises:
            ValueError: names or shapes are not the model's, or the version is older than the one
                served. The weights are unchanged.
            RuntimeError: it took longer than ``timeout_s``.
        """
        refuse_inference_mode()
        if version < self.version:
            raise ValueError(f"version {version} is older than {self.version}, which is served")
        pairs = _match_tensors(self._model, tensors)
        batcher, loop = self._running()
        future = loop.submit(batcher.update(pairs, version))
        try:
            future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise RuntimeError(f"the weight update took longer than {timeout_s:.0f} s") from None

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        if not prompt:
            raise ValueError("the prompt is empty; expected at least one token")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise ValueError(
                f"the prompt has a token outside the model's vocabulary of {self.vocab_size}; "
                "check that the tokenizer belongs to the model"
            )
        if len(prompt) + params.max_tokens > self.context_length:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and max_tokens={params.max_tokens} exceed the "
                f"context of {self.context_length} tokens"
            )
        if self.routes is not None and params.routes_start > len(prompt):
            raise ValueError(
                f"routes_start is {params.routes_start}, beyond the prompt of {len(prompt)} tokens"
            )
        if params.top_p < 1 or params.top_k != -1:
            raise ValueError(
                f"top_p={params.top_p}, top_k={params.top_k}: this engine samples from the full "
                "distribution (top_p=1, top_k=-1)"
            )
        if params.seed is not None:
            raise ValueError("this engine has no seed per request; pass TransformersEngine(seed=)")

    def _running(self) -> tuple[Batcher, BackgroundLoop]:
        if self._batcher is None or self._loop is None:
            raise RuntimeError(
                "the engine is not running; use `with TransformersEngine(...) as engine`"
            )
        return self._batcher, self._loop


def _round_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert parameters in place; buffers, such as rotary frequencies, keep their precision."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _match_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pair each served tensor with its new value: ``(served, new)``.

    The names are those of ``model.state_dict()``: parameters and saved buffers. A tensor with two
    names needs only one of them.

    Raises:
        ValueError: a name is unknown, a shape differs, or a tensor is missing.
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
        covered.add(served[name].data_ptr())
        pairs.append((served[name], new))
    missing = [name for name, tensor in served.items() if tensor.data_ptr() not in covered]
    if missing:
        raise ValueError(
            f"no weights were given for {', '.join(missing[:5])} ({len(missing)} tensors)"
        )
    return pairs
