"""Recorded conversations: what engines are asked for, and what is trained, is as it was recorded.

``recorded.json`` has digests of the engine calls and samples of random conversations. It was
written before ``Conversation``, the histories of agents and the adapter of verifiers shared their
code. After an intended change, ``python tests/rollout/conversations/test_recorded.py`` writes it
again.
"""

import asyncio
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("recorded.json")
SEEDS = range(9)
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "helpers"))
pytest.importorskip("verifiers")

from chat_tokenizer import chat_tokenizer

from primerl import rollout
from primerl.rollout.conversations.history import History
from primerl.rollout.renderers.loading import load_renderer
from primerl.types import Completion, SamplingParams

TOKENIZER = chat_tokenizer()
PARAMS = SamplingParams(max_tokens=24, temperature=0.7)
TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}]
TEXTS = ["Yes.", "Ü, no?", '<tool_call>{"name": "look", "arguments": {}}</tool_call>']


def digest(*parts):
    return xxhash.xxh64_hexdigest(repr(parts).encode())


class Engine:
    """Draws bytes, or texts, that may be cut; some calls fail. Keeps digests of its calls."""

    version = 0

    def __init__(self, seed, *, context_length, failing=0.1):
        self.context_length = context_length
        self._failing = failing
        self.calls = []
        self._random = random.Random(seed)

    async def generate(self, prompt_ids, params, *, session=None):
        await asyncio.sleep(0)
        draw = self._random
        prompt = [int(token) for token in prompt_ids]
        asked = params.max_tokens, params.routes_start, sorted(params.stop_token_ids)
        self.calls.append(digest(prompt, asked, params.temperature))
        if draw.random() < self._failing:
            raise RuntimeError("this call was drawn to fail")
        tokens = [draw.randrange(256) for _ in range(draw.randrange(1, 12))]
        if draw.random() < 0.5:
            tokens = TOKENIZER.encode(draw.choice(TEXTS), add_special_tokens=False) or tokens
        if draw.random() < 0.8:
            tokens.append(TOKENIZER.eos_token_id)
        tokens = tokens[: params.max_tokens]
        stopped = tokens[-1] == TOKENIZER.eos_token_id
        if not stopped:
            tokens += [65] * (params.max_tokens - len(tokens))
        self.version += draw.randrange(2)
        number = len(self.calls)
        return Completion(
            token_ids=tokens,
            logprobs=[-draw.random() for _ in tokens],
            versions=np.sort([self.version + draw.randrange(2) for _ in tokens]),
            finish_reason="stop" if stopped else "length",
            routes=[f"route:{number}"] if draw.random() < 0.8 else [],
        )


def described(samples, engine):
    """The digests of a rollout's calls and samples."""
    return {
        "calls": engine.calls,
        "samples": [
            digest(
                one.token_ids.tolist(),
                one.loss_mask.tolist(),
                one.behavior_logprobs.tolist(),
                one.versions.tolist(),
                one.temperature,
                list(one.routes),
                None if one.observation_mask is None else one.observation_mask.tolist(),
            )
            for one in samples
        ],
    }


def conversation(seed):
    """Turns of an environment, as strings and as messages, with and without a chat template."""
    engine = Engine(seed, context_length=300 + 200 * (seed % 2))
    draw = random.Random(seed)
    tokenizer = chat_tokenizer()
    if seed % 3 == 2:
        tokenizer.chat_template = None

    async def play():
        chat = rollout.Conversation(engine, tokenizer, PARAMS)
        stops = []
        for turn in range(9):
            text = f"Turn {turn}."
            messages = [{"role": "user", "content": text}]
            if draw.random() < 0.3:
                messages.insert(0, {"role": "system", "content": "Hurry."})
            plain = seed % 3 == 2 or draw.random() < 0.5
            try:
                reply = await chat.turn(text if plain else messages)
            except (RuntimeError, ValueError):
                reply = "failed"
            stops.append((reply, chat.stop))
        return described([chat.sample()], engine) | {"told": digest(stops)}

    return asyncio.run(play())


def agent(seed):
    """Clients of a history, which continue, edit, cut, summarise and fork their conversations."""
    engine = Engine(seed, context_length=900)
    draw = random.Random(seed)
    history = History(engine, load_renderer(TOKENIZER), PARAMS, keep_reasoning=bool(seed % 2))

    async def play():
        known = {name: [[{"role": "user", "content": f"I am {name}."}]] for name in ("a", "b")}
        told = []
        for turn in range(16):
            name = draw.choice("aab")
            messages = list(draw.choice(known[name]) if draw.random() < 0.2 else known[name][-1])
            change = draw.random()
            if change < 0.1:
                place = draw.randrange(len(messages))
                messages[place] = {**messages[place], "content": "Changed."}
            elif change < 0.2:
                messages = messages[draw.randrange(len(messages)) :]
            if messages[-1].get("tool_calls"):
                number = messages[-1]["tool_calls"][0]["id"]
                result = {"role": "tool", "content": "A door.", "tool_call_id": number}
                messages.append(result)
            elif draw.random() < 0.9:
                messages.append({"role": "user", "content": f"Turn {turn}."})
            tools = TOOLS if seed % 2 else None
            try:
                reply = await history.reply(messages, agent=name, tools=tools)
            except (RuntimeError, ValueError) as error:
                told.append(type(error).__name__)
                continue
            known[name].append([*messages, reply.message])
            told.append((reply.message, reply.finish_reason, reply.malformed, reply.origin))
        origins = sorted(history.origins.items())
        return described(history.samples(), engine) | {"told": digest(told, origins)}

    return asyncio.run(play())


def adapter(seed):
    """Environments of verifiers, without and with hooks, which may change what is said."""
    name = ["dungeon", "hooked-dungeon", "censored-dungeon"][seed % 3]
    renderer = None
    if seed == 3:
        from renderers import DefaultRendererConfig

        renderer = DefaultRendererConfig()
    environment = rollout.verifiers(
        name, tokenizer=TOKENIZER, renderer=renderer, config={"turns": 8}, max_turns=6
    )
    task = next(iter(environment.tasks))
    engine = Engine(seed, context_length=330 + 300 * (seed % 2), failing=0.03)

    async def play():
        try:
            return await environment(task, engine, PARAMS)
        finally:
            await environment.aclose()

    try:
        played = asyncio.run(play())
    except RuntimeError as error:
        return {"calls": engine.calls, "samples": [], "told": digest(str(error))}
    told = digest(played.reward, sorted(played.metrics.items()), played.stop)
    return described(played.samples, engine) | {"told": told}


ROLLOUTS = {"conversation": conversation, "agent": agent, "adapter": adapter}


@pytest.mark.parametrize("name", ROLLOUTS)
def test_calls_and_samples_are_those_recorded(name, monkeypatch):
    environments = str(ROOT / "helpers/verifiers_environments")
    monkeypatch.syspath_prepend(environments)
    monkeypatch.setenv("PYTHONPATH", f"{environments}:{os.environ.get('PYTHONPATH', '')}")
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))[name]

    assert [ROLLOUTS[name](seed) for seed in SEEDS] == recorded
    assert all(one["calls"] for one in recorded)
    assert any(len(one["samples"]) for one in recorded)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "helpers/verifiers_environments"))
    made = {name: [play(seed) for seed in SEEDS] for name, play in ROLLOUTS.items()}
    RECORDED.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
