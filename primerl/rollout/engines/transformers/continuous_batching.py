"""Setup of transformers' continuous batching, for every version of transformers that has it."""

import functools
import inspect
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from primerl._common.optional import require

PAGE_TOKENS = 32
START_S = 120.0
STOP_S = 30.0


def start_batching(model: Any, *, max_concurrent: int, cache_tokens: int, seed: int | None) -> Any:
    """Start and return a batching manager, whose loop runs in its own thread.

    It reports processed logprobs, takes a temperature per request, runs steps synchronously (an
    update must fall between two steps) and shares no cache blocks between requests.

    Raises:
        RuntimeError: it did not start, for example because the cache does not fit into memory.
    """
    transformers = require("transformers", extra="transformers")
    require("psutil", extra="transformers")  # without it, no memory is detected for the cache
    generation = transformers.GenerationConfig(
        do_sample=True,
        temperature=0.5,  # any value but 1 enables temperatures per request
        top_k=0,
        top_p=1.0,
        eos_token_id=-1,
        max_new_tokens=1,
    )
    config = transformers.ContinuousBatchingConfig
    options = supported(
        config,
        page_size=PAGE_TOKENS,
        num_blocks=math.ceil(cache_tokens / PAGE_TOKENS),
        max_batch_tokens=max(512, max_concurrent),
        max_requests_per_batch=max_concurrent,
        allow_block_sharing=False,
        scheduler_type=_register_scheduler(),
        use_async_batching=False,
        use_cuda_graph=False,
        return_logprobs=True,
        per_request_processors=True,
        auto_switch_to_flash=False,
        seed=seed,
    )
    if "page_size" not in options:  # transformers 5.17
        options["block_size"] = PAGE_TOKENS
    manager = model.init_continuous_batching(
        generation_config=generation, continuous_batching_config=config(**options)
    )
    # The manager's thread inherits daemon=True, so the process can exit if nobody stops it.
    starter = threading.Thread(target=manager.start, daemon=True)
    starter.start()
    starter.join()
    deadline = time.monotonic() + START_S
    while manager.batch_processor is None:
        if not manager.is_running():
            status = getattr(manager, "background_thread_status", None)
            cause = getattr(status, "fatal_error", None)
            raise RuntimeError(f"continuous batching did not start: {cause}") from cause
        if time.monotonic() > deadline:
            stop_batching(manager)
            raise RuntimeError(f"continuous batching did not start within {START_S:.0f} s")
        time.sleep(0.005)
    return manager


@functools.cache
def _register_scheduler() -> str:
    """Add this module's scheduler to those of transformers; return its name."""
    module = "transformers.generation.continuous_batching.scheduler"
    scheduler = require(module, extra="transformers")

    class Unblocked(scheduler.FIFOScheduler):  # type: ignore[misc]  # known at run time only
        """Admits requests again after all active requests have been cancelled.

        After evicting requests, transformers admits no request until another one ends. If all
        active requests are cancelled, as by an update, none ends, and the waiting requests would
        wait forever.
        """

        def clear_cancelled_requests(self) -> Any:
            cancelled = super().clear_cancelled_requests()
            if not self.active_requests:
                self.block_new_requests = False
            return cancelled

    name = "primerl"
    scheduler.SCHEDULER_MAPPING[name] = Unblocked
    return name


def stop_batching(manager: Any) -> None:
    """End the manager's loop, whose thread would otherwise keep the process from ending."""
    manager.stop(block=True, timeout=STOP_S, **supported(manager.stop, hard_stop=True))


def supported(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Return the ``options`` that this version of the function accepts."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in known}


def refuse_unsupported(model: Any) -> None:
    """Raise a ValueError for a model that continuous batching does not support."""
    config: Any = model.config
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    reason = None
    if not hasattr(model, "init_continuous_batching"):
        reason = "is not a generative transformers model"
    elif getattr(text, "kv_lora_rank", None):
        reason = "has latent attention (MLA)"
    elif getattr(text, "index_topk", None):
        reason = "has sparse attention"
    elif kinds - {"full_attention", "sliding_attention"}:
        reason = f"has layers of the types {', '.join(sorted(kinds))}"
    if reason:
        raise ValueError(
            f"{config.model_type} {reason}, which continuous batching does not support; "
            "serve this model with vLLM"
        )


def refuse_inference_mode() -> None:
    """Raise a RuntimeError under ``torch.inference_mode``, whose tensors can't be updated."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "TransformersEngine cannot run under torch.inference_mode, whose tensors can't be "
            "updated in place; leave it, or use torch.no_grad"
        )
