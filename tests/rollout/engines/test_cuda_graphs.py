"""Decoding steps as CUDA graphs: their inputs, sizes and obstacles, on a CPU.

In place of a graph, the step is computed again on the same tensors. On a GPU, the last test
compares real graphs with a plain forward pass.
"""

import asyncio
import copy
import logging
import random
import time

import pytest
import torch
from served_models import generate_all, perturbed
from torch._subclasses.fake_tensor import FakeTensorMode

from primerl import rollout, testing
from primerl.rollout.engines.transformers.cuda_graphs import (
    HEADER,
    DecodingGraphs,
    DecodingStep,
)
from primerl.rollout.engines.transformers.decoder import Decoder, NextTokenLogits, find_shapes
from primerl.rollout.engines.transformers.kv_cache import PagedCache
from primerl.rollout.engines.transformers.model_attention import switch_to_pages
from primerl.rollout.engines.transformers.pages import PageTable
from primerl.rollout.engines.transformers.scheduler import BatchedRequest
from primerl.testing.families import tiny_family
from primerl.types import SamplingParams

PAGES = 64


def paged(model):
    """Switch a copy of the model to pages; return it with a cache."""
    served = copy.deepcopy(model).requires_grad_(False)
    switch_to_pages(served)
    shapes = find_shapes(served).shapes
    return NextTokenLogits(served), PagedCache(
        shapes, device=torch.device("cpu"), pages=PAGES, windowed_pages=PAGES
    )


class Repeated:
    """Captures a step by keeping its function; ``sizes`` has the number of its requests."""

    def __init__(self):
        self.sizes = []

    def __call__(self, launch):
        result = launch()
        self.sizes.append(len(result))
        return lambda: result.copy_(launch())


def run(decoder, prompts, params, during=None):
    """Return each request's tokens and logprobs; ``during`` is called once some are sampled."""
    requests = [
        BatchedRequest(
            tokens=[*prompt],
            prompt_length=len(prompt),
            params=params,
            randomness=bytes([number]),
        )
        for number, prompt in enumerate(prompts)
    ]
    decoder.start()
    for request in requests[:-1]:
        decoder.submit(request)
    while len(requests[0].logprobs) < 5:
        time.sleep(0.001)
    decoder.submit(requests[-1])  # a prompt beside requests that decode
    if during is not None:
        during()
    for request in requests:
        request.done.result(60)
    decoder.close(10)
    return requests


def decoder_of(model, cache, **settings):
    return Decoder(
        model,
        cache,
        PageTable(PAGES, window=cache.window, windowed_pages=PAGES),
        max_concurrent=8,
        max_step_tokens=512,
        recompute=True,
        version=0,
        **settings,
    )


def prompts(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(2, 64) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "deepseek_v3", "gpt_oss"])
def test_steps_from_graphs_equal_steps_without(family):
    model = perturbed(tiny_family(family), 3)
    params = SamplingParams(max_tokens=40)
    asked = prompts([3, 20, 31, 70, 9])
    plain = run(decoder_of(*paged(model)), asked, params)
    served, cache = paged(model)
    capture = Repeated()
    graphs = DecodingGraphs(served, cache, capture=capture)

    graphed = run(decoder_of(served, cache, graphs=graphs), asked, params)

    assert set(capture.sizes) >= {4, 8}  # 4 and 5 requests
    assert len(capture.sizes) == len(graphs._graphs)
    for one, other in zip(graphed, plain, strict=True):
        assert one.tokens == other.tokens
        torch.testing.assert_close(
            torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=1e-5, atol=1e-5
        )


def test_weights_that_move_are_captured_again_and_changed_ones_are_not():
    model = testing.tiny_model("qwen3")
    served, cache = paged(model)
    graphs = DecodingGraphs(served, cache, capture=Repeated())
    (parameter, *_) = served.parameters()

    graphs._graphs[1, 1] = object()
    parameter.data.mul_(2)
    graphs.forget_moved()
    assert graphs._graphs

    parameter.data = parameter.data.clone()
    graphs.forget_moved()
    assert not graphs._graphs


def test_an_update_during_steps_from_graphs_is_seen_by_later_tokens():
    model, changed = testing.tiny_model("qwen3"), testing.tiny_model("qwen3", seed=9)
    served, cache = paged(model)
    decoder = decoder_of(served, cache, graphs=DecodingGraphs(served, cache, capture=Repeated()))

    def load():
        served.model.load_state_dict(changed.state_dict())

    requests = run(
        decoder,
        prompts([4, 6, 8]),
        SamplingParams(max_tokens=60),
        during=lambda: decoder.update(load, 1).result(30),
    )

    for request in requests:
        assert request.versions[-1] == 1
        start = request.prompt_length
        logits = changed(torch.tensor([request.tokens])).logits[0, start - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(request.tokens[start:])[:, None])
        newer = torch.tensor(request.versions) == 1
        torch.testing.assert_close(
            torch.tensor(request.logprobs)[newer], logprobs[newer, 0], rtol=1e-5, atol=1e-5
        )


def test_if_no_step_can_be_captured_requests_are_decoded_without_graphs(caplog):
    def fail(launch):
        raise RuntimeError("operation not permitted when stream is capturing")

    served, cache = paged(testing.tiny_model("qwen3"))
    graphs = DecodingGraphs(served, cache, capture=fail)
    with caplog.at_level(logging.WARNING):
        requests = run(
            decoder_of(served, cache, graphs=graphs), prompts([4, 6]), SamplingParams(max_tokens=20)
        )
    assert all(len(request.logprobs) == 20 for request in requests)
    (record,) = caplog.records
    assert "without CUDA graphs" in record.getMessage()
    assert "not permitted when stream is capturing" in record.getMessage()


@pytest.mark.parametrize(
    ("family", "obstacle"),
    [
        ("qwen3", None),
        ("gemma3_text", None),
        ("deepseek_v32", "chooses keys for one request at a time"),
        ("qwen3_moe", "waits for values of tensors"),
    ],
)
def test_an_obstacle_to_graphs_is_named(family, obstacle):
    model = tiny_family(family)
    if family == "qwen3_moe":
        model.set_experts_implementation("eager")
    found = DecodingGraphs(*paged(model), capture=Repeated()).obstacle()
    assert found is None if obstacle is None else obstacle in found


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "deepseek_v3", "gpt_oss"])
def test_a_step_uses_no_tensors_of_another_device(family):
    """The meta device stands in for a GPU."""
    served, cache = paged(tiny_family(family).bfloat16())
    step = DecodingStep(served)

    def elsewhere(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    with FakeTensorMode(), torch.no_grad():
        named = [*step.named_parameters(), *step.named_buffers()]
        tensors = {name: elsewhere(tensor) for name, tensor in named}
        cache.layers = [elsewhere(layer) for layer in cache.layers]
        width = HEADER + 2 + min(2, cache.window_pages)
        inputs = torch.zeros(4, width, dtype=torch.int64, device="meta")
        logits = torch.func.functional_call(step, tensors, (inputs, cache, 2))
    assert (logits.device.type, len(logits)) == ("meta", 4)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe"])
def test_graphs_on_a_gpu_give_the_logprobs_of_a_plain_forward_pass(family):
    model = perturbed(tiny_family(family), 3).cuda()
    asked = prompts([3, 20, 31, 70, 9, 100])
    with rollout.TransformersEngine(model, seed=0, max_concurrent=8) as engine:
        completions = asyncio.run(generate_all(engine, asked, SamplingParams(max_tokens=60)))
    for prompt, completion in zip(asked, completions, strict=True):
        tokens = torch.tensor([[*prompt, *completion.token_ids.tolist()]], device="meta")
        with torch.no_grad():
            logits = model(tokens).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), expected.cpu(), rtol=1e-3, atol=1e-3
        )
