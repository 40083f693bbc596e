"""Makes vLLM sample the text of a script, for models that are too weak to write it themselves.

vLLM's structured outputs restrict each token to those that continue the text. vLLM therefore
samples the tokens one by one. Most are not those that the tokenizer would choose for the text, and
each has the logprob of the distribution that it was sampled from.
"""

import attrs

from primerl.serving.protocol import requests


class ForcedText:
    """An engine that requests the text ``script(prompt, number)`` and records the completions.

    It wraps a ``VLLMEngine``. If the script returns None, the model samples freely. ``number`` is
    the number of the request.
    """

    def __init__(self, engine, script, monkeypatch):
        self.requests = []
        self._engine = engine
        self._script = script
        self._number = 0
        self._texts = {}
        body_of = requests.generate_body

        def forced_body(params, **how):
            body = body_of(params, **how)
            _, text = self._texts.get(id(params), (params, None))
            if text is not None:
                body["sampling_params"]["structured_outputs"] = {"choice": [text]}
            return body

        monkeypatch.setattr(requests, "generate_body", forced_body)

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def generate(self, prompt_ids, params, *, session=None):
        prompt = list(prompt_ids)
        number, self._number = self._number, self._number + 1
        params = attrs.evolve(params)  # identifies the request; kept, so that its id stays its own
        self._texts[id(params)] = params, self._script(prompt, number)
        completion = await self._engine.generate(prompt, params, session=session)
        self.requests.append((prompt, completion))
        return completion
