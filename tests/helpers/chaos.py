"""A fleet of scripted vLLM servers under a seeded schedule of kills, hangs and wrong answers.

Each server samples in a fixed number of slots at a fixed speed, so that the capacity of those that
are well is known. Its tokens are random, so that an answer is recognized by its tokens.
"""

import asyncio
import itertools
import json
import random
import threading
import time
from collections import Counter

import attrs
from scripted_vllm import ScriptedVLLM

VOCABULARY = 1 << 20
CHUNK = 8  # tokens that a request samples at once
SLOWDOWN = 8
WRONG_ANSWERS = {
    "truncated": lambda answer, page: page[: len(page) // 2],
    "of another request": lambda answer, page: _page(answer, request_id="generate-tokens-other"),
    "too short": lambda answer, page: _page_of_choice(
        answer,
        token_ids=answer["choices"][0]["token_ids"][:-1],
        logprobs={"content": answer["choices"][0]["logprobs"]["content"][:-1]},
    ),
    "of another run": lambda answer, page: _page_of_choice(
        answer,
        weight_versions=[
            {**span, "version": "another-1"} for span in answer["choices"][0]["weight_versions"]
        ],
    ),
    "other logprobs": lambda answer, page: _page_of_choice(
        answer,
        logprobs={
            "content": [
                {**entry, "token_id": entry["token_id"] + 1}
                for entry in answer["choices"][0]["logprobs"]["content"]
            ]
        },
    ),
}
FAULTS = ("hung", "frozen", "slow", "error 500", "error 503", *WRONG_ANSWERS)
"""A hung server answers everything but completions; a frozen one answers nothing."""


def _page(answer, **fields):
    return json.dumps({**answer, **fields}).encode()


def _page_of_choice(answer, **fields):
    return _page(answer, choices=[{**answer["choices"][0], **fields}])


class ChaosServer(ScriptedVLLM):
    """A scripted server with ``slots`` requests at a time, and a lasting ``fault``."""

    def __init__(self, *, slots, token_s, answers):
        super().__init__(token_s=token_s, vocabulary=VOCABULARY, context=1 << 14)
        self.slots = slots
        self.answers = answers  # by tokens: the labels of the weights that sampled them
        self.fault = None
        self.gauges = lambda: [f'vllm:generation_tokens_total{{engine="0"}} {self.sampled}']

    async def _start(self):
        self._slots = asyncio.Semaphore(self.slots)
        await super()._start()

    async def _answer(self, method, target, headers, content):
        await self._while("frozen")
        return await super()._answer(method, target, headers, content)

    async def _while(self, *faults):
        while self.fault in faults:
            await asyncio.sleep(0.02)

    async def _generate(self, body):
        if self.fault in ("error 500", "error 503"):
            return int(self.fault[-3:]), {"error": {"message": self.fault}}
        async with self._slots:
            self.running += 1
            try:
                tokens, spans = await self._sample(body["sampling_params"]["max_tokens"])
            finally:
                self.running -= 1
        answer = {
            "request_id": f"generate-tokens-{body['request_id']}",
            "model": "scripted",
            "usage": {"prompt_tokens": len(body["token_ids"])},
            "choices": [
                {
                    "finish_reason": "length",
                    "token_ids": tokens,
                    "logprobs": {"content": [{"token_id": t, "logprob": -1.0} for t in tokens]},
                    "weight_versions": spans,
                }
            ],
        }
        page = json.dumps(answer).encode()
        if self.fault in WRONG_ANSWERS:
            return 200, WRONG_ANSWERS[self.fault](answer, page)
        labels = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
        self.answers[tuple(tokens)] = labels
        return 200, page

    async def _sample(self, count):
        tokens, spans = [], []
        while len(tokens) < count:
            chunk = min(CHUNK, count - len(tokens))
            slowdown = SLOWDOWN if self.fault == "slow" else 1
            await asyncio.sleep(self.token_s * chunk * slowdown)
            await self._gate.wait()
            await self._while("hung", "frozen")
            if not spans or spans[-1]["version"] != self.label:
                spans.append({"version": self.label, "start": len(tokens), "end": len(tokens)})
            tokens += random.choices(range(VOCABULARY), k=chunk)
            spans[-1]["end"] = len(tokens)
            self.sampled += chunk
        return tokens, spans


@attrs.frozen
class Event:
    """A fault of the server ``place``, which begins at ``at_s`` and lasts for ``for_s``."""

    at_s: float
    place: int
    kind: str
    for_s: float


def draw_events(seed, *, seconds, places, well, mean_s):
    """Return random events; at any time, at least ``well`` servers are without a fault."""
    draw = random.Random(seed)
    kinds = ["killed", "killed", "killed", "left", *FAULTS]
    busy = dict.fromkeys(range(places), 0.0)
    events, at_s = [], 0.0
    while at_s < seconds:
        at_s += draw.expovariate(places / (4 * mean_s))
        free = [place for place, until_s in busy.items() if until_s <= at_s]
        if len(free) > well:
            for_s = mean_s * draw.uniform(0.3, 2.0)
            place = draw.choice(free)
            events.append(Event(at_s, place, draw.choice(kinds), for_s))
            busy[place] = at_s + for_s
    return events


class Chaos:
    """A fleet to which the events happen while the context is entered."""

    def __init__(self, events, *, places, slots, token_s):
        self._events = events
        self._make = lambda: ChaosServer(slots=slots, token_s=token_s, answers=self.answers)
        self.answers = {}
        self._left = []
        self.servers = [self._make() for _ in range(places)]
        self.capacity = 0.0
        """The tokens that the servers which were well could sample so far."""
        self.happened = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.engine = None
        self.error = None

    @property
    def sampled(self):
        """The tokens of all right answers so far."""
        return sum(map(len, list(self.answers)))

    def describe(self):
        """Describe the faults so far, and the tokens that were sampled more than once."""
        faults = Counter(one.kind for one in self.happened)
        again = self.paid / max(1, self.sampled) - 1
        return f"{dict(faults)}; {again:.1%} of tokens sampled again"

    @property
    def paid(self):
        """The tokens that the servers sampled so far, for whatever answer."""
        return sum(one.sampled for one in [*self.servers, *self._left])

    def __enter__(self):
        for server in self.servers:
            server.start()
        return self

    def __exit__(self, *_):
        self.stop()
        for server in self.servers:
            server.fault = None
            server.kill()

    def begin(self, engine):
        """Let the events begin; ``engine`` is told of servers that leave and join."""
        self.engine = engine
        self._thread.start()

    def stop(self):
        """End all faults; afterwards all servers are well."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self):
        try:
            self._play()
        except BaseException as error:
            self.error = error

    def _play(self):
        order = itertools.count()
        began = last = time.monotonic()
        waiting = sorted((one.at_s, next(order), one, True) for one in self._events)
        ill = {}
        while ill or not self._over.is_set():
            over = self._over.is_set()
            now = time.monotonic()
            well = len(self.servers) - sum(
                1 if kind != "slow" else 1 - 1 / SLOWDOWN for kind in ill.values()
            )
            server = self.servers[0]
            self.capacity += (now - last) * well * server.slots / server.token_s
            last = now
            while waiting and (over or waiting[0][0] <= now - began):
                _, _, event, starts = waiting.pop(0)
                if starts and not over:
                    self.happened.append(event)
                    ill[event.place] = event.kind
                    self._strike(event)
                    waiting.append((event.at_s + event.for_s, next(order), event, False))
                    waiting.sort()
                elif not starts:
                    self._heal(event)
                    ill.pop(event.place)
            self._over.wait(0.02)

    def _strike(self, event):
        server = self.servers[event.place]
        if event.kind == "left":
            self.engine.leave(server.url)
        elif event.kind == "killed":
            server.kill()
        else:
            server.fault = event.kind

    def _heal(self, event):
        server = self.servers[event.place]
        if event.kind == "left":
            server.kill()
            self._left.append(server)
            self.servers[event.place] = self._make().start()
            self.engine.join(self.servers[event.place].url)
        elif event.kind == "killed":
            server.restart()
        else:
            server.fault = None
