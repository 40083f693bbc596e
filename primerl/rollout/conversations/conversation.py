"""A multi-turn conversation between an environment and the policy, and ``single_turn``.

The conversation is a growing sequence of tokens; ``single_turn`` makes an environment of one turn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from primerl.rollout.conversations.calls import EngineCall, sample_call, stitch
from primerl.rollout.conversations.messages import Message
from primerl.rollout.engines.protocol import Engine
from primerl.rollout.engines.token_sequence import TokenSequence
from primerl.rollout.environments.environment import Environment, Reward, Task, reward_of
from primerl.rollout.renderers.template import TemplateRenderer
from primerl.types import Rollout, Sample, SamplingParams


class Conversation:
    """A conversation between an environment and the policy, as one growing sequence of tokens.

        chat = Conversation(engine, tokenizer, params)
        reply = await chat.turn([{"role": "user", "content": "What is 2 + 2?"}])
        reply = await chat.turn([{"role": "user", "content": "Are you sure?"}])
        return chat.rollout(reward=float("4" in reply))

    A turn appends only new tokens: those of the chat template's text between the last reply and
    the next, then the sampled tokens of the reply. Tokenizing a decoded reply again would train on
    tokens that the policy never sampled. If the engine records expert routes, each turn requests
    only the routes that earlier turns have not recorded, and the sample refers to the routes of all
    turns.

    Args:
        engine: the engine that samples the replies.
        tokenizer: a Hugging Face tokenizer. If it has a chat template, a turn given as a string is
            a user message; otherwise the string is appended as it is.
        params: sampling parameters of every reply. The tokenizer's ``eos_token_id`` also stops a
            reply.
        session: an id of the conversation, for engines of servers: its turns go to the server that
            has it cached, and send only what is new.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        params: SamplingParams,
        *,
        session: str | None = None,
    ) -> None:
        stops = dict.fromkeys((*params.stop_token_ids, tokenizer.eos_token_id))
        stop_token_ids = [token for token in stops if token is not None]
        self.params = attrs.evolve(params, stop_token_ids=stop_token_ids)
        self.token_ids = TokenSequence()
        self._calls: list[EngineCall] = []
        self._engine = engine
        self._tokenizer = tokenizer
        self._session = session
        self._renderer = TemplateRenderer(tokenizer, stop_token_ids=stop_token_ids)
        self._opening: list[Message] = []

    @property
    def stop(self) -> str:
        """How the last reply ended: ``"stop"``, ``"length"``, or ``"context"``.

        ``"context"`` means that the context left less room than ``max_tokens``.
        """
        return self._calls[-1].stop if self._calls else "stop"

    async def turn(self, messages: Sequence[Message] | str) -> str:
        """Append ``messages``, sample a reply, and return its text.

        If a turn raises an error, the conversation stays as it was.

        Raises:
            ContextFull: (a ValueError) the messages leave no room for a reply.
            ValueError: ``messages`` is a list, but the tokenizer has no chat template.
            Exception: any error of the engine.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        elif not getattr(self._tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat template; pass the turn as a string, or set "
                "tokenizer.chat_template"
            )
        new = self._tokens_of(messages)
        prompt = self.token_ids.extended(new)
        call = await sample_call(
            self._engine,
            prompt,
            self.params,
            parent=self._calls[-1] if self._calls else None,
            new=len(new),
            session=self._session,
        )
        if not self._calls:
            self._opening = list(messages)
        reply = call.completion.token_ids
        self.token_ids = prompt.extended(reply)
        self._calls.append(call)
        return str(self._tokenizer.decode(reply.tolist(), skip_special_tokens=True))

    def sample(self) -> Sample:
        """Return the conversation so far as one sample.

        Raises:
            ValueError: no turn has been taken.
        """
        if not self._calls:
            raise ValueError(
                "the conversation has no reply yet, so it has no sample; take a turn first"
            )
        (sample,) = stitch(self._calls, temperature=self.params.temperature)
        return sample

    def rollout(self, *, reward: float, metrics: Mapping[str, float] | None = None) -> Rollout:
        """Return the finished conversation as a ``Rollout`` with ``reward``."""
        return Rollout(
            samples=[self.sample()], reward=reward, metrics=metrics or {}, stop=self.stop
        )

    def _tokens_of(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens that a turn adds before its reply."""
        if self._calls:
            last = self.token_ids[-1]
            return self._renderer.tokens_appended(last, messages, opening=self._opening)
        return self._renderer.render(messages, add_generation_prompt=True).token_ids


def single_turn(tokenizer: Any, *, reward: Reward) -> Environment:
    """Return an environment of one prompt and one reply.

    Args:
        tokenizer: a Hugging Face tokenizer.
        reward: ``(task, reply) -> number``, or a coroutine function of the same form.

    The task's ``"prompt"`` is a string, or a list of chat messages. A string becomes a user message
    if the tokenizer has a chat template; otherwise it is the prompt itself.

    If the reward function fails, the run stops with a ``RewardError`` that names the task: this is
    a mistake in the experiment, which retrying would hide.
    """

    async def environment(task: Task, engine: Engine, params: SamplingParams) -> Rollout:
        if "prompt" not in task:
            raise ValueError(f"the task has no 'prompt'; its keys are {sorted(task)}")
        chat = Conversation(engine, tokenizer, params)
        reply = await chat.turn(task["prompt"])
        return chat.rollout(reward=await reward_of(reward, task, reply))

    return environment
