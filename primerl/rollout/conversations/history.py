"""The tree of conversations in one rollout, which maps an agent's messages to exact tokens."""

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from primerl.rollout.conversations.calls import EngineCall, sample_call, stitch
from primerl.rollout.conversations.cuts import cut_completion
from primerl.rollout.conversations.messages import Message, Tools, calls_key, message_key
from primerl.rollout.conversations.prompts import (
    Prompts,
    Unrenderable,
    computed,
    message_of,
    size_of,
)
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.engines.token_sequence import TokenSequence
from primerl.types import Sample, SamplingParams

_MESSAGE_SIZE = 100  # characters that take as long as a message without text


@attrs.define(eq=False)
class _Place:
    """A node in the tree of conversations: a message, and its engine call if it was sampled."""

    message: Message | None = None
    above: "_Place | None" = None
    below: dict[tuple[Any, ...], "_Place"] = attrs.Factory(dict)
    call: EngineCall | None = None
    tokens: TokenSequence = attrs.Factory(TokenSequence)  # up to the end of ``call``
    asked: int = 0  # the number of requests whose last message is this one
    extended: bool = False

    @property
    def followers(self) -> int:
        """How many requests and messages have followed this message."""
        return self.asked + len(self.below)

    def next(self, message: Message, key: tuple[Any, ...]) -> "_Place":
        place = self.below.get(key)
        if place is None:
            place = self.below[key] = _Place(message, self)
        return place

    @property
    def reply_ids(self) -> list[int]:
        """The tokens of the call's completion."""
        assert self.call is not None
        tokens: list[int] = self.call.completion.token_ids.tolist()
        return tokens

    def prompt_ids(self) -> list[int]:
        """Return the tokens of the call's prompt."""
        return self.tokens[: -len(self.reply_ids)]

    def tokens_after(self, rendered: list[int]) -> list[int] | None:
        """Return ``rendered`` without the call's tokens; None if it does not begin with them."""
        count = len(self.tokens)
        return rendered[count:] if self.tokens == rendered[:count] else None

    @property
    def messages(self) -> list[Message]:
        place, found = self, []
        while place.above is not None and place.message is not None:
            found.append(place.message)
            place = place.above
        return found[::-1]

    def calls(self, last: EngineCall) -> list[EngineCall | None]:
        """Return, for each of ``messages``, the call that sampled it, or None.

        ``last`` is the last call of this conversation. A reply before the path of ``last`` begins
        gets the call that sampled it in another branch.
        """
        path = last.path
        place, found = self, []
        while place.above is not None:
            replied = place.call is not None
            found.append(path.pop() if replied and path else place.call)
            place = place.above
        return found[::-1]


_Keyed = tuple[Message, Any, _Place]
"""A message of the last request, its content, and its node in the tree."""


@attrs.frozen(kw_only=True, eq=False)
class _Prompt:
    """The prompt of a request: ``tokens`` are those of the reply ``known``, if any, and ``new``."""

    place: _Place
    known: _Place | None
    new: list[int]
    tokens: TokenSequence
    origin: str


@attrs.frozen(kw_only=True, eq=False)
class Reply:
    """The policy's reply to one request.

    ``finish_reason`` is ``"stop"``, ``"length"``, or ``"context"`` if the context was full.
    ``malformed`` describes what is wrong with each tool call that can't be executed. ``stop`` is
    the stop string that ended the reply, if one did.
    """

    message: dict[str, Any]
    call: EngineCall
    finish_reason: str
    malformed: list[str]
    prompt_tokens: int
    origin: str
    _place: _Place
    _followers: int
    stop: str | None = None

    @property
    def conversation(self) -> list[Message]:
        """The messages up to and including this reply."""
        return self._place.messages

    @property
    def continued(self) -> bool:
        """Whether a later request contained this reply, so that its client has received it."""
        return self._place.followers > self._followers


class History:
    """The recorded conversations of one rollout, to which the policy's replies are sampled.

    Sampled tokens are fed back to the engine unchanged. Each request holds a whole conversation, as
    clients of chat APIs send it. The request is matched to the longest recorded conversation with
    which it begins, and only the tokens of the messages after that are added. Where this is not
    possible, the whole request is rendered anew, which begins a branch; ``origins`` counts these
    cases.

    Args:
        engine: the engine that samples the replies.
        renderer: as ``load_renderer`` returns it; its stop tokens are added to those of ``params``.
        params: sampling parameters of every reply.
        session: an id of the rollout, for engines with several servers.
        keep_reasoning: whether a reply that a client sends back without its reasoning matches the
            recorded reply, so that the reasoning stays in the context. By default it does not
            match: the context then lacks the reasoning, as in the request, which begins a branch.
        tokenizer: for replies that are cut at strings, and for those whose beginning is given.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Any,
        params: SamplingParams,
        *,
        session: str | None = None,
        keep_reasoning: bool = False,
        tokenizer: Any = None,
    ) -> None:
        stops = dict.fromkeys((*params.stop_token_ids, *renderer.get_stop_token_ids()))
        self.params = attrs.evolve(params, stop_token_ids=tuple(stops))
        self.calls: list[EngineCall] = []
        self.origins: Counter[str] = Counter()
        """The number of requests by their relation to earlier requests.

        ``"start"``: the request begins a conversation. ``"extends"``: it continues a conversation,
        token for token. ``"fork"``: it continues a conversation from a point that another request
        has already continued. ``"edited"``: the agent changed the history. ``"unbridged"``: the
        renderer can't append the turn to the sampled tokens. The last three begin a branch.
        """
        self.resent = 0
        """The number of requests that repeated an earlier request and were sampled again."""
        self._engine = engine
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._session = session
        self._reasoning = not keep_reasoning
        self._replies = itertools.count()
        self._roots: dict[tuple[str, str, str], _Place] = {}
        self._prompts: dict[str, Prompts] = {}
        self._tools: tuple[Tools | None, str] = (None, "null")
        # The last request's messages: agents in this process send the same objects again, whose
        # keys then need not be computed.
        self._keyed: list[_Keyed] = []
        self._ends: list[tuple[_Place, str, Tools | None]] = []  # one per call

    async def reply(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        agent: str = "policy",
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        one_call: bool = False,
        begins: str = "",
        template: Mapping[str, Any] | None = None,
    ) -> Reply:
        """Sample the policy's reply to ``messages``, and record it.

        Messages are in OpenAI's format, with text as their content. If the awaiting task is
        cancelled, nothing is recorded.

        Args:
            messages: the conversation.
            tools: the functions that the policy may call.
            agent: the agent that the reply belongs to.
            max_tokens: a limit below that of ``params``.
            stop: the reply ends with the token that completes one of these strings. Its message
                does not contain the string; its tokens do.
            one_call: the reply ends with its first tool call.
            begins: the text with which the reply begins; it is part of the prompt.
            template: further arguments of the chat template, the same in all of a conversation.

        Raises:
            ContextFull: the prompt leaves no room for a reply.
            Unrenderable: the chat template or the tokenizer rejects the messages.
            Exception: any error of the engine.
        """
        if (stop or one_call) and getattr(self._engine, "routes", None) is not None:
            raise Unrenderable(
                "replies whose expert routes are recorded can't be cut: leave out stop strings and "
                "parallel_tool_calls=false, or train without router replay"
            )
        tools = tools or None
        arguments = json.dumps(template or {}, sort_keys=True)
        prompts = self._prompts_with(template, arguments)
        wanted = min(self.params.max_tokens, max_tokens or self.params.max_tokens)
        prompt = await self._prompt(prompts, messages, tools, agent, arguments, begins)
        known, new, tokens = prompt.known, prompt.new, prompt.tokens
        parent = None if known is None else known.call
        call = await sample_call(
            self._engine,
            tokens,
            attrs.evolve(self.params, max_tokens=wanted),
            parent=parent,
            new=len(new),
            session=self._session,
            agent=agent,
        )
        reply_ids: list[int] = call.completion.token_ids.tolist()
        cut = prompts.cut(reply_ids, tools, tokens, stop=stop, one_call=one_call)
        if cut is not None:
            completion = cut_completion(call.completion, cut)
            call = attrs.evolve(call, completion=completion, filled_context=False)
        self.resent += prompt.place.asked > 0
        prompt.place.asked += 1
        self.origins[prompt.origin] += 1
        if known is not None:
            known.extended = True
        return self._record(
            prompt,
            call,
            tools,
            prompts=prompts,
            begins=begins,
            stop=None if cut is None else cut.stop,
        )

    async def _prompt(
        self,
        prompts: Prompts,
        messages: Sequence[Message],
        tools: Tools | None,
        agent: str,
        template: str,
        begins: str,
    ) -> "_Prompt":
        """Return the prompt of a request, after the longest recorded conversation it continues.

        Raises:
            ContextFull: a message does not fit into the context.
            Unrenderable: the chat template or the tokenizer rejects the messages.
        """
        seen = self._seen(messages)
        added = messages[seen:]
        size = size_of(added)
        await prompts.check_size(added, size, self._engine.context_length)
        keys = await computed(
            lambda: [self._key(message) for message in added],
            size=size + _MESSAGE_SIZE * len(added),
        )
        place, known, count = self._find(messages, [None] * seen + keys, tools, agent, template)
        tail = messages[count:]
        new: list[int] | None = None
        rendered: list[int] | None = None
        if known is not None and tail and not _has_reply(tail):
            new = await prompts.after(known.reply_ids, tail, tools, known.prompt_ids)
            if new is None:  # the whole rendering may still begin with the sampled tokens
                rendered = await prompts.rendered(messages, tools)
                new = known.tokens_after(rendered)
        origin = self._origin(place, known, tail, bridged=new is not None)
        if new is None:
            known = None
            new = await prompts.rendered(messages, tools) if rendered is None else rendered
        if begins:
            new = new + await prompts.beginning(begins, prompt_ids=new)
        tokens = TokenSequence(new) if known is None else known.tokens.extended(new)
        return _Prompt(place=place, known=known, new=new, tokens=tokens, origin=origin)

    async def count_tokens(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        begins: str = "",
        template: Mapping[str, Any] | None = None,
    ) -> int:
        """Return how many tokens a prompt of these messages has if it is rendered anew.

        Raises:
            ContextFull: the messages can't fit into the context.
            Unrenderable: the chat template or the tokenizer rejects the messages.
        """
        prompts = self._prompts_with(template, json.dumps(template or {}, sort_keys=True))
        size = size_of(messages)
        await prompts.check_size(messages, size, self._engine.context_length)
        tokens = await prompts.rendered(messages, tools or None)
        if begins:
            tokens = tokens + await prompts.beginning(begins, prompt_ids=tokens)
        return len(tokens)

    def samples(
        self, agents: Sequence[str] | None = None, *, side_jobs: bool = True
    ) -> list[Sample]:
        """Return the fewest samples that train the calls of ``agents`` (by default of all)."""
        calls = self._trained(agents, side_jobs)
        return stitch(calls, temperature=self.params.temperature)

    def side_jobs(self) -> list[EngineCall]:
        """Return the calls of side jobs, such as the title that a program gives a conversation.

        A side job is a single reply, without tools, to a conversation with another system message
        or other tools than the conversation in which its agent took the most turns, if that has
        tools or several turns.
        """
        groups: dict[tuple[str, Any, Any], list[int]] = {}
        for index, (call, end) in enumerate(zip(self.calls, self._ends, strict=True)):
            place, _, tools = end
            first = place.messages[0]
            system = first["content"] if first["role"] == "system" else None
            groups.setdefault((call.agent, system, json.dumps(tools)), []).append(index)
        most: dict[str, list[int]] = {}
        for (agent, _, _), group in groups.items():
            most[agent] = max(most.get(agent, []), group, key=len)
        found = []
        for (agent, _, _), (index, *others) in groups.items():
            main = most[agent]
            is_job = len(main) > 1 or self._ends[main[0]][2] is not None
            if is_job and main[0] != index and not others and self._ends[index][2] is None:
                found.append(index)
        return [self.calls[index] for index in sorted(found)]

    def _trained(self, agents: Sequence[str] | None, side_jobs: bool) -> list[EngineCall]:
        left_out = set() if side_jobs else {id(call) for call in self.side_jobs()}
        return [
            call
            for call in self.calls
            if (agents is None or call.agent in agents) and id(call) not in left_out
        ]

    def forget(self, call: EngineCall) -> None:
        """Remove the last call of a conversation, whose reply no client has received."""
        index = self.calls.index(call)
        place, origin, _ = self._ends.pop(index)
        del self.calls[index]
        self.origins[origin] -= 1
        others = [
            other for other, end in zip(self.calls, self._ends, strict=True) if end[0] is place
        ]
        place.call = others[-1] if others else None
        place.tokens = TokenSequence(others[-1].token_ids if others else ())

    def conversation(
        self, agents: Sequence[str] | None = None, *, side_jobs: bool = True
    ) -> dict[str, Any]:
        """Return the last conversation, as ``primerl.data`` reads it, and all as ``branches``.

        Each branch has its ``agent``, ``messages`` and ``tools``; ``origin``, the reason why it
        begins; ``turns``, for each message the number (from 1) of the call that sampled it, or
        None; ``sample``, the index of its sample in ``samples``, or None; and ``side_job``, whether
        it is one (see ``side_jobs``).
        """
        jobs = {id(call) for call in self.side_jobs()}
        trained = {id(call) for call in self._trained(agents, side_jobs)}
        extended = {id(call.parent) for call in self.calls}
        number_of = {id(call): number for number, call in enumerate(self.calls, start=1)}
        origin_of = {id(call): end[1] for call, end in zip(self.calls, self._ends, strict=True)}
        branches: list[dict[str, Any]] = []
        samples = itertools.count()
        for call, (place, _, tools) in zip(self.calls, self._ends, strict=True):
            if id(call) in extended:
                continue
            first = call
            while origin_of[id(first)] == "extends" and first.parent is not None:
                first = first.parent
            branches.append(
                {
                    "agent": call.agent,
                    "origin": origin_of[id(first)],
                    "messages": place.messages,
                    "turns": [number_of.get(id(one)) for one in place.calls(call)],
                    "sample": next(samples) if id(call) in trained else None,
                    "side_job": id(call) in jobs,
                    "tools": tools,
                }
            )
        last = branches[-1] if branches else {"messages": [], "tools": None}
        conversation: dict[str, Any] = {"messages": last["messages"], "branches": branches}
        if last["tools"]:
            conversation["tools"] = list(last["tools"])
        return conversation

    def _seen(self, messages: Sequence[Message]) -> int:
        """Return with how many of the last request's messages these begin, as the same objects."""
        count = 0
        for message, (known, content, _) in zip(messages, self._keyed, strict=False):
            if message is not known or message.get("content") is not content:
                break
            count += 1
        return count

    def _find(
        self,
        messages: Sequence[Message],
        keys: Sequence[Any],
        tools: Tools | None,
        agent: str,
        template: str,
    ) -> tuple[_Place, _Place | None, int]:
        """Return the node of the last message, and the last recorded reply with its position.

        The position counts from 1. Without a recorded reply, the second is None and the third 0.
        """
        if tools is not self._tools[0]:
            self._tools = (tools, json.dumps(tools, sort_keys=True))
        place = self._roots.setdefault((agent, self._tools[1], template), _Place())
        known, count = None, 0
        before, self._keyed = self._keyed, []
        for number, (message, key) in enumerate(zip(messages, keys, strict=True), start=1):
            same = _same_place(place, message, before, number - 1)
            place = same or self._next(place, message, key or self._key(message))
            self._keyed.append((message, message.get("content"), place))
            if place.call is not None:
                known, count = place, number
        return place, known, count

    def _next(self, place: _Place, message: Message, key: tuple[Any, ...]) -> _Place:
        """Return the node of a message below ``place``.

        A reply that a client sends back with its tool calls, but without the text beside them, is
        found by the ids of the calls.
        """
        if key not in place.below and message.get("tool_calls") and not message.get("content"):
            calls = calls_key(message)
            found = [
                below
                for (role, _, *others), below in place.below.items()
                if role == "assistant" and below.call is not None and others == [key[2], calls]
            ]
            if len(found) == 1:
                return found[0]
        return place.next(message, key)

    def _key(self, message: Message) -> tuple[Any, ...]:
        return message_key(message, reasoning=self._reasoning)

    def _origin(
        self, place: _Place, known: _Place | None, tail: Sequence[Message], *, bridged: bool
    ) -> str:
        if bridged and known is not None:
            return "fork" if known.extended else "extends"
        said = _has_reply(tail)
        if known is not None:
            return "edited" if said or not tail else "unbridged"
        if place.asked:
            return "fork"
        return "edited" if said and self.calls else "start"

    def _prompts_with(self, template: Mapping[str, Any] | None, arguments: str) -> Prompts:
        if arguments not in self._prompts:
            self._prompts[arguments] = Prompts(self._renderer, self._tokenizer, template)
        return self._prompts[arguments]

    def _record(
        self,
        prompt: "_Prompt",
        call: EngineCall,
        tools: Tools | None,
        *,
        prompts: Prompts,
        begins: str,
        stop: str | None,
    ) -> Reply:
        tokens, origin = prompt.tokens, prompt.origin
        sampled = call.completion.token_ids
        parsed = prompts.parsed(sampled.tolist(), tools, tokens)
        number = next(self._replies)
        message, malformed = message_of(parsed, lambda call: f"call_{number}_{call}")
        if not tools:
            message.pop("tool_calls", None)
            malformed = []
        if stop is not None:
            for key in ("reasoning_content", "content"):
                if key in message:
                    message[key] = message[key].partition(stop)[0]
        whole = {**message, "content": begins + message["content"]} if begins else message
        end = prompt.place.next(whole, self._key(whole))
        end.call, end.tokens, end.extended = call, tokens.extended(sampled), False
        self.calls.append(call)
        self._ends.append((end, origin, tools))
        return Reply(
            message=message,
            call=call,
            finish_reason=call.stop,
            malformed=malformed,
            prompt_tokens=len(tokens),
            origin=origin,
            place=end,
            followers=end.followers,
            stop=stop,
        )


def _has_reply(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "assistant" for message in messages)


def _same_place(
    above: _Place, message: Message, before: Sequence[_Keyed], index: int
) -> _Place | None:
    """Return a message's node in the last request, unless it or a message above has changed."""
    if index >= len(before):
        return None
    said, content, place = before[index]
    same = said is message and content is message.get("content") and place.above is above
    return place if same else None
