"""SmolLM2's chat template with one token per byte, and engines that record their requests."""

import json
from collections import Counter

import numpy as np
from byte_tokenizer import byte_tokenizer

from primerl.types import Completion

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_tokenizer():
    return byte_tokenizer(["<|im_end|>", "<|im_start|>"], SMOLLM2)


def tool_call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class RecordingEngine:
    """An engine that records prompts; its replies are scripted or random, one version per token.

    ``reply`` is a function of the prompt's text and the call's number, or None for random bytes.
    """

    context_length = 1 << 20

    def __init__(self, tokenizer, reply=None, *, seed=0, pause=None):
        self.tokenizer = tokenizer
        self.version = 0
        self.requests = []
        self._reply = reply
        self._draw = np.random.default_rng(seed)
        self._pause = pause

    async def generate(self, prompt_ids, params, *, session=None):
        prompt = list(prompt_ids)
        number = len(self.requests)
        if self._pause is not None:
            await self._pause(number)
        if self._reply is None:  # includes bytes that are not text
            tokens = self._draw.integers(0, 256, self._draw.integers(1, 12)).tolist()
        else:
            text = self._reply(self.tokenizer.decode(prompt), number)
            tokens = self.tokenizer.encode(text, add_special_tokens=False)
        stops = {self.tokenizer.eos_token_id, *params.stop_token_ids}
        if tokens[-1] not in stops:
            tokens.append(self.tokenizer.eos_token_id)
        tokens = tokens[: params.max_tokens]
        stopped = tokens[-1] in stops
        if not stopped:
            tokens += [0] * (params.max_tokens - len(tokens))
        self.version += 1
        completion = Completion(
            token_ids=tokens,
            logprobs=-self._draw.random(len(tokens)),
            versions=[self.version] * len(tokens),
            finish_reason="stop" if stopped else "length",
        )
        self.requests.append((prompt, completion))
        return completion

    @property
    def sampled(self):
        """Count the sampled tokens, each with its prefix, its logprob and its version."""
        return Counter(
            (
                (*prompt, *completion.token_ids.tolist()[: i + 1]),
                float(completion.logprobs[i]),
                int(completion.versions[i]),
            )
            for prompt, completion in self.requests
            for i in range(len(completion.token_ids))
        )


def trained(samples):
    """Count the trained tokens of samples, each with its prefix, its logprob and its version."""
    return Counter(
        (
            tuple(one.token_ids[: i + 1].tolist()),
            float(one.behavior_logprobs[i]),
            int(one.versions[i]),
        )
        for one in samples
        for i in np.flatnonzero(one.loss_mask)
    )
