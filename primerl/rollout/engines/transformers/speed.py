"""Tokens per second of the engines that can serve a model on this machine."""

import asyncio
import contextlib
import gc
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

from primerl._common.optional import require
from primerl.rollout.engines.transformers.engine import (
    CACHE_SHARE,
    TransformersEngine,
    free_memory,
)
from primerl.rollout.engines.transformers.support import rope_limit
from primerl.rollout.errors import message
from primerl.types import SamplingParams

# vLLM comes first: it reserves memory that engines in this process would take.
ENGINES = ("vLLM", "TransformersEngine", "generate")
GIB = 2**30
# How long vLLM may take to end after its last row.
STOP_S = 60.0
# The program of the process in which vLLM is measured.
CHILD = """
import json, sys
from primerl.rollout.engines.transformers.speed import Workload, measure_vllm
measure_vllm(Workload(**json.loads(sys.argv[1])))
"""
SampleAll = Callable[[list[list[int]], int], None]
"""A function ``(prompts, new tokens) -> None`` that samples a completion of each prompt."""


@attrs.frozen(kw_only=True)
class Workload:
    """The requests that each engine serves.

    Args:
        model: model folder or hub id.
        dtype: of weights and cache.
        requests: how many requests are sent at once.
        prompts: how many tokens a prompt has.
        new_tokens: how many tokens are sampled in each request.
        group: how many requests have the same prompt.
        vocabulary: prompts have token ids below it.
        positions: the model's number of positions, if it is limited.
    """

    model: str
    dtype: str
    requests: Sequence[int]
    prompts: Sequence[int]
    new_tokens: int
    group: int
    vocabulary: int
    positions: int | None


@attrs.frozen
class SpeedRow:
    """A row of the table: the seconds that an engine took, or the reason why it was not measured.

    ``requests`` is None if the reason applies to every number of requests, and ``prompt`` if it
    applies to every prompt.
    """

    requests: int | None
    prompt: int | None
    seconds: float | None = None
    reason: str = ""


def measure_speed(
    model: str,
    *,
    dtype: str,
    requests: Sequence[int],
    prompts: Sequence[int],
    new_tokens: int,
    group: int,
    engines: Sequence[str] = ENGINES,
) -> dict[tuple[str, int, int], float]:
    """Print and return the sampled tokens per second, by engine, requests and prompt length.

    The time is that of all requests together, from the first to the last, prompts included. Each
    number is the faster one of two runs, on prompts of random tokens that no run has seen before.
    An engine that does not start, or refuses requests, is printed with the reason. vLLM runs in a
    separate process, so that its memory is free for the other engines.

    Args:
        model: model folder or hub id.
        dtype: of weights and cache.
        requests: how many requests are sent at once.
        prompts: how many tokens a prompt has.
        new_tokens: how many tokens are sampled in each request.
        group: how many requests have the same prompt.
        engines: which of ``ENGINES`` to measure; vLLM only if it is installed.

    Raises:
        ValueError: there is no model under this name.
    """
    transformers = require("transformers", extra="transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"no model was found under {model!r}: {_one_line(error)}") from error
    work = Workload(
        model=model,
        dtype=dtype,
        requests=requests,
        prompts=prompts,
        new_tokens=new_tokens,
        group=group,
        vocabulary=config.get_text_config().vocab_size,
        positions=rope_limit(config),
    )
    speeds = {}
    print(f"{'engine':20}{'requests':>10}{'prompt':>8}{'tokens/s':>10}{'seconds':>9}")  # noqa: T201
    for name in engines:
        for row in _rows_in_child(work) if name == "vLLM" else _rows(name, work):
            place = f"{name:20}{row.requests or '':>10}{row.prompt or '':>8}"
            if row.requests is None or row.prompt is None or row.seconds is None:
                print(f"{place}  {row.reason}", flush=True)  # noqa: T201
                continue
            speed = row.requests * new_tokens / row.seconds
            speeds[name, row.requests, row.prompt] = speed
            print(f"{place}{speed:>10.0f}{row.seconds:>9.2f}", flush=True)  # noqa: T201
        gc.collect()
        torch.cuda.empty_cache()
    return speeds


def _rows(name: str, work: Workload) -> Iterator[SpeedRow]:
    """Measure an engine in this process."""
    fitting = []
    for length in work.prompts:
        needed = length + work.new_tokens
        if work.positions is None or needed <= work.positions:
            fitting.append(length)
        else:
            yield SpeedRow(None, length, reason=f"{needed} tokens, but {work.positions} positions")
    if not fitting:
        return
    rng = random.Random(0)
    try:
        with _opened(name, work, context=max(fitting) + work.new_tokens) as sample_all:
            for length in fitting:
                for count in work.requests:
                    yield _measured(sample_all, work, rng, count, length)
    except Exception as error:  # every kind: the next engine is measured all the same
        yield SpeedRow(None, None, reason=_one_line(error))


def _measured(
    sample_all: SampleAll, work: Workload, rng: random.Random, count: int, length: int
) -> SpeedRow:
    seconds = []
    for _ in range(2):
        asked = _prompts(rng, work.vocabulary, count, length, work.group)
        began = time.perf_counter()
        try:
            sample_all(asked, work.new_tokens)
        except Exception as error:  # every kind: other requests may be served
            return SpeedRow(count, length, reason=_one_line(error))
        seconds.append(time.perf_counter() - began)
    return SpeedRow(count, length, min(seconds))


def _rows_in_child(work: Workload) -> Iterator[SpeedRow]:
    """Measure vLLM in a separate process, whose output goes to a file."""
    if importlib.util.find_spec("vllm") is None:
        yield SpeedRow(None, None, reason="not installed")
        return
    with tempfile.NamedTemporaryFile(prefix="primerl-vllm-", suffix=".log", delete=False) as log:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, json.dumps(attrs.asdict(work))],
            stdout=subprocess.PIPE,
            stderr=log,
            env=_vllm_environment(),
        )
    keep_log = False
    try:
        assert child.stdout is not None
        for line in child.stdout:
            row = SpeedRow(**json.loads(line))
            if row.requests is None and row.prompt is None:
                keep_log = True
                row = attrs.evolve(row, reason=f"{row.reason} (log: {log.name})")
            yield row
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_S)
        if child.returncode and not keep_log:
            keep_log = True
            reason = f"ended with exit code {child.returncode} (log: {log.name})"
            yield SpeedRow(None, None, reason=reason)
    finally:
        child.kill()
        child.communicate()
        if not keep_log:
            Path(log.name).unlink()


def _vllm_environment() -> dict[str, str]:
    ours = {"VLLM_NO_USAGE_STATS": "1"}
    if not torch.cuda.is_available():
        # As much as the embedded engine takes; vLLM would reserve most of the memory.
        gib = CACHE_SHARE * free_memory(torch.device("cpu")) / GIB
        ours["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(gib)))
        # As in servers that recipes start: one process, whose threads may use all cores.
        ours["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        ours["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return ours | dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)}


def measure_vllm(work: Workload) -> None:
    """Print the rows of vLLM as JSON, and all other output to stderr; runs in a child process."""
    with os.fdopen(os.dup(1), "w") as rows:
        os.dup2(2, 1)
        for row in _rows("vLLM", work):
            print(json.dumps(attrs.asdict(row)), file=rows, flush=True)


def _one_line(error: Exception) -> str:
    """Return the beginning of an error's message, or the error's name if it has none."""
    return textwrap.shorten(message(error), 200, placeholder=" ...") or type(error).__name__


def _prompts(
    rng: random.Random, vocabulary: int, count: int, length: int, group: int
) -> list[list[int]]:
    prompts: list[list[int]] = []
    while len(prompts) < count:
        prompt = [rng.randrange(vocabulary) for _ in range(length)]
        prompts += [prompt] * min(group, count - len(prompts))
    return prompts


@contextmanager
def _opened(name: str, work: Workload, *, context: int) -> Iterator[SampleAll]:
    if name == "vLLM":
        yield _vllm(work, context)
        return
    transformers = require("transformers", extra="transformers")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, work.dtype)
    made = transformers.AutoModelForCausalLM.from_pretrained(work.model, dtype=dtype)
    model: Any = made.to(device).eval()
    if name == "generate":
        yield lambda prompts, count: _generate(model, prompts, count)
        return
    with TransformersEngine(model, share_weights=True) as engine:
        yield lambda prompts, count: _sample(engine, prompts, count)


def _sample(engine: TransformersEngine, prompts: list[list[int]], count: int) -> None:
    async def sample_all() -> None:
        params = SamplingParams(max_tokens=count)
        await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))

    asyncio.run(sample_all())


def _generate(model: Any, prompts: list[list[int]], count: int) -> None:
    token_ids = torch.tensor(prompts, device=model.device)
    model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
    )


def _vllm(work: Workload, context: int) -> SampleAll:
    vllm = require("vllm", extra="vllm")
    served = vllm.LLM(model=work.model, dtype=work.dtype, max_model_len=context)

    def sample_all(prompts: list[list[int]], count: int) -> None:
        params = vllm.SamplingParams(max_tokens=count, ignore_eos=True, logprobs=0)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        served.generate(asked, params, use_tqdm=False)

    return sample_all
