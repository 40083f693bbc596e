"""The tree of conversations in one rollout, which maps an agent's messages to exact tokens."""

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs

from primerl.rollout.conversations.calls import EngineCall, sample_call, shared_tokens, stitch
from primerl.rollout.conversations.messages import Message, Tools, message_key, valid_unicode
from primerl.rollout.engines.protocol import Engine
from primerl.types import Sample, SamplingParams


class Unrenderable(ValueError):
    """Raised when a conversation can't be rendered, for example if its roles do not alternate."""


@attrs.define(eq=False)
class _Place:
    """A node in the tree of conversations: a message, and its engine call if it was sampled."""

    message: Message | None = None
    above: "_Place | None" = None
    below: dict[tuple[Any, ...], "_Place"] = attrs.Factory(dict)
    call: EngineCall | None = None
    tokens: list[int] | None = None  # up to the end of ``call``; None once another call took them
    asked: int = 0  # the number of requests whose last message is this one
    extended: bool = False

    def next(self, message: Message, key: tuple[Any, ...]) -> "_Place":
        place = self.below.get(key)
        if place is None:
            place = self.below[key] = _Place(message, self)
        return place

    def take_tokens(self) -> list[int]:
        """Return the tokens up to the end of the call, as a list that the caller may extend."""
        tokens, self.tokens = self.all_tokens, None
        return tokens

    @property
    def all_tokens(self) -> list[int]:
        """The tokens up to the end of the call; the caller must not change the list."""
        assert self.call is not None
        return self.call.token_ids.tolist() if self.tokens is None else self.tokens

    def tokens_after(self, rendered: list[int]) -> list[int] | None:
        """Return ``rendered`` without the call's tokens; None if it does not begin with them."""
        before = self.all_tokens
        return rendered[len(before) :] if rendered[: len(before)] == before else None

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
class Reply:
    """The policy's reply to one request.

    ``finish_reason`` is ``"stop"``, ``"length"``, or ``"context"`` if the context was full.
    ``malformed`` describes what is wrong with each tool call that can't be executed.
    """

    message: dict[str, Any]
    call: EngineCall
    finish_reason: str
    malformed: list[str]
    prompt_tokens: int
    origin: str
    _place: _Place

    @property
    def conversation(self) -> list[Message]:
        """The messages up to and including this reply."""
        return self._place.messages


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
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Any,
        params: SamplingParams,
        *,
        session: str | None = None,
        keep_reasoning: bool = False,
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
        self._session = session
        self._reasoning = not keep_reasoning
        self._roots: dict[tuple[str, str], _Place] = {}
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
    ) -> Reply:
        """Sample the policy's reply to ``messages``, and record it.

        Messages are in OpenAI's format, with text as their content. If the awaiting task is
        cancelled, nothing is recorded.

        Raises:
            ContextFull: the prompt leaves no room for a reply.
            Unrenderable: the chat template or the tokenizer rejects the messages.
            Exception: any error of the engine.
        """
        tools = tools or None
        wanted = min(self.params.max_tokens, max_tokens or self.params.max_tokens)
        place, known, count = self._find(messages, tools, agent)
        tail, new, rendered = messages[count:], None, None
        if known is not None and tail and not _has_reply(tail):
            new = self._tokens_after(known, tail, tools)
            if new is None:  # the whole rendering may still begin with the sampled tokens
                rendered = self._render(messages, tools)
                new = known.tokens_after(rendered)
        origin = self._origin(place, known, tail, bridged=new is not None)
        if new is None or known is None:
            known = None
            tokens = new = self._render(messages, tools) if rendered is None else rendered
        else:
            tokens = known.take_tokens()
            tokens += new
        parent = None if known is None else known.call
        prompt_tokens = len(tokens)
        params = attrs.evolve(self.params, max_tokens=wanted)
        try:
            call = await sample_call(
                self._engine,
                tokens,
                params,
                parent=parent,
                new=len(new),
                session=self._session,
                agent=agent,
            )
        except BaseException:  # also on cancellation: restore the list
            if known is not None:
                del tokens[prompt_tokens - len(new) :]
                known.tokens = tokens
            raise
        self.resent += place.asked > 0
        place.asked += 1
        self.origins[origin] += 1
        if known is not None:
            known.extended = True
        return self._record(place, call, tokens, tools, origin)

    def samples(self, agents: Sequence[str] | None = None) -> list[Sample]:
        """Return the fewest samples that train the calls of ``agents`` (by default of all)."""
        calls = [call for call in self.calls if agents is None or call.agent in agents]
        return stitch(calls, temperature=self.params.temperature)

    def forget(self, call: EngineCall) -> None:
        """Remove the last call of a conversation, whose reply no client has received."""
        index = self.calls.index(call)
        place, origin, _ = self._ends.pop(index)
        del self.calls[index]
        self.origins[origin] -= 1
        place.call = place.tokens = None

    def conversation(self, agents: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the last conversation, as ``primerl.data`` reads it, and all as ``branches``.

        Each branch has its ``agent``, ``messages`` and ``tools``; ``origin``, the reason why it
        begins; ``turns``, for each message the number (from 1) of the call that sampled it, or
        None; and ``sample``, the index of its sample in ``samples(agents)``, or None.
        """
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
                    "sample": next(samples) if agents is None or call.agent in agents else None,
                    "tools": tools,
                }
            )
        last = branches[-1] if branches else {"messages": [], "tools": None}
        conversation: dict[str, Any] = {"messages": last["messages"], "branches": branches}
        if last["tools"]:
            conversation["tools"] = list(last["tools"])
        return conversation

    def _find(
        self, messages: Sequence[Message], tools: Tools | None, agent: str
    ) -> tuple[_Place, _Place | None, int]:
        """Return the node of the last message, and the last recorded reply with its position.

        The position counts from 1. Without a recorded reply, the second is None and the third 0.
        """
        if tools is not self._tools[0]:
            self._tools = (tools, json.dumps(tools, sort_keys=True))
        place = self._roots.setdefault((agent, self._tools[1]), _Place())
        known, count = None, 0
        before, self._keyed = self._keyed, []
        for number, message in enumerate(messages, start=1):
            place = _same_place(place, message, before, number - 1) or place.next(
                message, self._key(message)
            )
            self._keyed.append((message, message.get("content"), place))
            if place.call is not None:
                known, count = place, number
        return place, known, count

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

    def _render(self, messages: Sequence[Message], tools: Tools | None) -> list[int]:
        try:
            rendered = self._renderer.render(messages, tools=tools, add_generation_prompt=True)
        except Exception as error:  # templates and renderers raise anything
            raise Unrenderable(
                f"the conversation can't be rendered: {type(error).__name__}: {error}"
            ) from error
        return list(rendered.token_ids)

    def _tokens_after(
        self, known: _Place, messages: Sequence[Message], tools: Tools | None
    ) -> list[int] | None:
        """Return the tokens of ``messages`` after a reply; None if the renderer can't add them."""
        assert known.call is not None
        reply: list[int] = known.call.completion.token_ids.tolist()
        if hasattr(self._renderer, "tokens_after"):
            added: list[int] | None = self._renderer.tokens_after(reply, messages, tools=tools)
            return added
        prompt = known.all_tokens[: -len(reply)]
        rendered = self._renderer.bridge_to_next_turn(prompt, reply, list(messages), tools=tools)
        return None if rendered is None else known.tokens_after(list(rendered.token_ids))

    def _record(
        self,
        place: _Place,
        call: EngineCall,
        tokens: list[int],
        tools: Tools | None,
        origin: str,
    ) -> Reply:
        prompt_tokens = len(tokens)
        sampled = shared_tokens(call.completion.token_ids)
        parsed = self._renderer.parse_response(sampled, tools=tools, prompt_ids=tokens)
        message, malformed = self._message(parsed, with_calls=bool(tools))
        tokens += sampled
        end = place.next(message, self._key(message))
        end.call, end.tokens, end.extended = call, tokens, False
        self.calls.append(call)
        self._ends.append((end, origin, tools))
        return Reply(
            message=message,
            call=call,
            finish_reason=call.stop,
            malformed=malformed,
            prompt_tokens=prompt_tokens,
            origin=origin,
            place=end,
        )

    def _message(self, parsed: Any, *, with_calls: bool) -> tuple[dict[str, Any], list[str]]:
        """Return the reply in OpenAI's format, and a description of each malformed call."""
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content or ""}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        calls, malformed = [], []
        for number, call in enumerate(parsed.tool_calls if with_calls else ()):
            if str(call.status) != "ok" or not call.name:
                malformed.append(str(call.status))
                continue
            arguments = call.arguments
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments or {})
            function = {"name": valid_unicode(call.name), "arguments": valid_unicode(arguments)}
            name = valid_unicode(call.id or f"call_{len(self.calls)}_{number}")
            calls.append({"id": name, "type": "function", "function": function})
        if calls:
            message["tool_calls"] = calls
        return message, malformed


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
