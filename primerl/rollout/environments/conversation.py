"""Token-exact conversations: sampled tokens are never decoded and tokenized again."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from primerl.rollout.engines.protocol import Engine
from primerl.rollout.renderers.between_turns import Messages, between_turns, without_closing
from primerl.types import NOT_SAMPLED, Completion, Rollout, Sample, SamplingParams


class Conversation:
    """Turns between an environment and the policy, kept as one growing sequence of tokens.

        chat = Conversation(engine, tokenizer, params)
        reply = await chat.turn([{"role": "user", "content": "What is 2 + 2?"}])
        reply = await chat.turn([{"role": "user", "content": "Are you sure?"}])
        return chat.rollout(reward=float("4" in reply))

    A turn appends only new tokens: the chat template's text between the last reply and the next,
    then the sampled tokens of the reply. Tokenizing a decoded reply again would train on tokens
    that the policy never sampled. Of an engine that records expert routes, each turn asks for those
    that the turns before it have not recorded, and the sample refers to those of all turns.

    Args:
        engine: samples the replies.
        tokenizer: a Hugging Face tokenizer. A turn that is a string is a user's message if it has a
            chat template, and is the text itself if not.
        params: of every reply. The tokenizer's ``eos_token_id`` always stops a reply as well.
        session: an id of the conversation, for engines of several replicas.
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
        self.params = attrs.evolve(
            params, stop_token_ids=[token for token in stops if token is not None]
        )
        self.token_ids: list[int] = []
        self.stop = "stop"
        self._engine = engine
        self._tokenizer = tokenizer
        self._session = session
        self._loss_mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._routes: list[str] = []
        self._routes_end = 0  # tokens before it have routes
        self._opening: list[Mapping[str, Any]] = []

    async def turn(self, messages: Messages | str) -> str:
        """Append ``messages``, sample a reply and return it as text.

        ``stop`` then says how the reply ended: ``"stop"``, ``"length"``, or ``"context"`` if the
        context left less room than ``max_tokens``. A turn that raises leaves the conversation as it
        was.

        Raises:
            ValueError: the messages leave no room for a reply, or the tokenizer has no template
                for them.
            Exception: what the engine raises.
        """
        new = self._tokenize(messages)
        prompt = [*self.token_ids, *new]
        room = self._engine.context_length - len(prompt)
        if room < 1:
            raise ValueError(
                f"the conversation has {len(prompt)} tokens, which fills the engine's "
                f"context of {self._engine.context_length}; end it earlier or shorten the prompt"
            )
        params = attrs.evolve(
            self.params,
            max_tokens=min(self.params.max_tokens, room),
            routes_start=self._routes_end,
        )
        completion = await self._engine.generate(prompt, params, session=self._session)
        self._append(new)
        self._append(
            completion.token_ids.tolist(),
            completion.logprobs.tolist(),
            completion.versions.tolist(),
        )
        self._routes += completion.routes
        self._routes_end = known_routes(completion, len(self.token_ids))
        cut_short = completion.finish_reason == "length" and room < self.params.max_tokens
        self.stop = "context" if cut_short else completion.finish_reason
        return str(self._tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True))

    def sample(self) -> Sample:
        """The conversation so far, as one flat sequence."""
        sampled = np.array(self._loss_mask, np.bool_)
        observed = np.maximum.accumulate(sampled) & ~sampled
        return Sample(
            token_ids=self.token_ids,
            loss_mask=self._loss_mask,
            behavior_logprobs=self._logprobs,
            versions=self._versions,
            temperature=self.params.temperature,
            routes=self._routes,
            observation_mask=observed if observed.any() else None,
        )

    def rollout(self, *, reward: float, metrics: Mapping[str, float] | None = None) -> Rollout:
        """The finished conversation with its reward."""
        return Rollout(
            samples=[self.sample()], reward=reward, metrics=metrics or {}, stop=self.stop
        )

    def _append(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] | None = None,
    ) -> None:
        self.token_ids.extend(token_ids)
        self._loss_mask.extend([logprobs is not None] * len(token_ids))
        self._logprobs.extend(np.zeros(len(token_ids)) if logprobs is None else logprobs)
        self._versions.extend([NOT_SAMPLED] * len(token_ids) if versions is None else versions)

    def _tokenize(self, messages: Messages | str) -> list[int]:
        has_template = bool(getattr(self._tokenizer, "chat_template", None))
        if isinstance(messages, str):
            if not has_template:
                return self._encode(messages, special=not self.token_ids)
            messages = [{"role": "user", "content": messages}]
        if not has_template:
            raise ValueError(
                "the tokenizer has no chat template; pass the turn as a string, or set "
                "tokenizer.chat_template"
            )
        if not self.token_ids:
            self._opening = list(messages)
            return self._encode(self._render(self._opening))
        between = between_turns(self._render, self._opening, messages)
        return without_closing(
            self._encode(between.text),
            self.token_ids[-1],
            closing=self._encode(between.closing),
            stop_token_ids=self.params.stop_token_ids,
        )

    def _render(self, messages: Messages, reply_next: bool = True) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=reply_next
            )
        )

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special))


def known_routes(completion: Completion | None, length: int) -> int:
    """Up to which token the routes are known of ``length`` tokens that end with a completion.

    The last token was sampled, and has gone through no forward pass. The completion was asked for
    the routes that were not known before, so all are.
    """
    return length - 1 if completion is not None and completion.routes else 0
