"""Random conversations over all APIs: what was sampled is trained once, after what was seen.

Replies have reasoning, text and several calls. Clients send them back in all forms that they have:
as they are, stripped, by key only, by reference, or not at all in threads.
"""

import asyncio
import json
import random

import pytest
from chat_tokenizer import RecordingEngine, trained
from gateway_posts import blocks_of, opened
from toy_families import toy_renderer

from primerl.rollout import AgentLimits

SEEDS = range(12)


def writer(seed):
    """Return a policy that writes GLM-4.5's format at random."""
    rng = random.Random(seed)

    def reply(prompt, number):
        thought = rng.choice(["", "Hm.", "\n  Let me see.\n"])
        text = "" if prompt.endswith("<think>") or not thought else "\n<think>"
        text += f"{thought}</think>" if text or prompt.endswith("<think>") else ""
        text += rng.choice(["", f"I say {number}.", "\nTwo\nlines. "])
        for _ in range(rng.choice([0, 1, 1, 3])):
            value = json.dumps(rng.choice(["door", 3, 2.0, [1], {"a": None}, "ü\n"]))
            text += f"<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>{value}</arg_value>\n"
            text += "</tool_call>"
        return text + rng.choice(["<|user|>", "<|observation|>"])

    return reply


class ChatTalk:
    path = "/chat/completions"

    def __init__(self, rng):
        self._rng = rng
        self._messages = []

    def say(self, text):
        self._messages.append({"role": "user", "content": text})

    def answer(self, calls):
        for call in calls:
            self._messages.append({"role": "tool", "tool_call_id": call, "content": "open"})

    @property
    def body(self):
        tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
        return {"messages": self._messages, "tools": tools}

    async def turn(self, posts):
        if self._rng.random() < 0.5:
            said = joined(await posts.stream(self.path, self.body))
        else:
            _, answer = await posts.post(self.path, self.body)
            said = answer["choices"][0]["message"]
        kept = self._rng.choice(["reasoning", "reasoning_content"])
        sent = {key: said[key] for key in ("role", "content", "tool_calls", kept) if key in said}
        if self._rng.random() < 0.5 and sent.get("content"):
            sent["content"] = sent["content"].strip()
        self._messages.append(sent)
        return [call["id"] for call in said.get("tool_calls", ())]


def joined(chunks):
    """Put a streamed message together, as clients do."""
    said = {"role": "assistant", "content": ""}
    calls = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning", "reasoning_content"):
                if delta.get(key):
                    said[key] = said.get(key, "") + delta[key]
            for part in delta.get("tool_calls", ()):
                call = calls.setdefault(part["index"], {**part, "function": {"arguments": ""}})
                call["function"]["name"] = part["function"].get(
                    "name", call["function"].get("name")
                )
                call["function"]["arguments"] += part["function"].get("arguments", "")
    if calls:
        said["tool_calls"] = list(calls.values())
    return said


class MessagesTalk:
    path = "/messages"

    def __init__(self, rng):
        self._rng = rng
        self._messages = []
        self._thread = None
        self._threaded = rng.random() < 0.4

    def say(self, text):
        self._messages.append({"role": "user", "content": text})

    def answer(self, calls):
        content = [
            {"type": "tool_result", "tool_use_id": call, "content": "open"} for call in calls
        ]
        self._messages.append({"role": "user", "content": content})

    @property
    def body(self):
        tools = [{"name": "look", "input_schema": {"type": "object"}}]
        body = {"messages": self._messages, "max_tokens": 256}
        if self._thread is None:
            body["tools"] = tools
        if self._threaded:
            body["thread"] = self._thread or {"type": "create"}
        return body

    async def turn(self, posts):
        if self._rng.random() < 0.5:
            events = await posts.stream(self.path, self.body)
            blocks, name = blocks_of(events), events[0]["message"]["id"]
        else:
            _, answer = await posts.post(self.path, self.body)
            blocks, name = answer["content"], answer["id"]
        if self._threaded:
            self._thread = {"type": "continue", "previous_message_id": name}
            self._messages = []
        else:
            sent = [self._sent(dict(block)) for block in blocks]
            self._messages.append({"role": "assistant", "content": sent})
        return [block["id"] for block in blocks if block["type"] == "tool_use"]

    def _sent(self, block):
        form = self._rng.choice(["same", "stripped", "key only", "redacted"])
        if block["type"] == "text" and form == "stripped":
            block["text"] = block["text"].strip()
        if block["type"] == "thinking" and form == "key only":
            block["thinking"] = ""
        if block["type"] == "thinking" and form == "redacted":
            return {"type": "redacted_thinking", "data": block["signature"]}
        return block


class ResponsesTalk:
    path = "/responses"

    def __init__(self, rng):
        self._rng = rng
        self._items = []
        self._last = None
        self._continued = rng.random() < 0.4

    def say(self, text):
        self._items.append({"role": "user", "content": text})

    def answer(self, calls):
        for call in calls:
            output = {"type": "function_call_output", "call_id": call, "output": "open"}
            self._items.append(output)

    @property
    def body(self):
        tools = [{"type": "function", "name": "look", "parameters": {}}]
        body = {"input": self._items, "tools": tools, "instructions": "Be brief."}
        if self._last is not None:
            body["previous_response_id"] = self._last
        return body

    async def turn(self, posts):
        if self._rng.random() < 0.5:
            events = await posts.stream(self.path, self.body)
            made = events[-1]["response"]
        else:
            _, made = await posts.post(self.path, self.body)
        if self._continued:
            self._last = made["id"]
            self._items = []
        else:
            self._items = self._items + [self._sent(dict(item)) for item in made["output"]]
        return [item["call_id"] for item in made["output"] if item["type"] == "function_call"]

    def _sent(self, item):
        form = self._rng.choice(["same", "reference", "key only"])
        if form == "reference":
            return {"type": "item_reference", "id": item["id"]}
        if form == "key only" and item["type"] == "reasoning":
            item["summary"] = []
        return item


async def converse(posts, talk, rng):
    """Play a few turns; return how many."""
    talk.say("Open?")
    turns = rng.randint(2, 5)
    for _ in range(turns):
        calls = await talk.turn(posts)
        if calls:
            talk.answer(calls)
        if not calls or rng.random() < 0.3:
            talk.say(rng.choice(["Go on.", "And ü now?"]))
    return turns


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_sampled_is_trained_once_after_what_was_seen(seed):
    renderer, tokenizer = toy_renderer("glm-4.5", thinking_retention="all")
    engine = RecordingEngine(tokenizer, writer(seed))
    rng = random.Random(seed)
    kinds = [ChatTalk, MessagesTalk, ResponsesTalk]
    rng.shuffle(kinds)

    async def main():
        async with opened(
            engine,
            tokenizer=tokenizer,
            renderer=renderer,
            limits=AgentLimits(max_turns=1000),
        ) as posts:
            talks = [kind(random.Random(rng.random())) for kind in kinds]
            turns = await asyncio.gather(*(converse(posts, talk, rng) for talk in talks))
        return posts.session, turns

    session, turns = asyncio.run(main())
    played = session.rollout(reward=1.0)
    assert len(engine.requests) == sum(turns)
    assert trained(played.samples) == engine.sampled
    # A conversation that is only appended to is one sample, but for turns that the renderer can't
    # add to sampled tokens.
    origins = session.history.origins
    assert len(played.samples) == 3 + origins["unbridged"], origins
    assert origins["edited"] == 0
