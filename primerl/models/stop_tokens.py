"""The tokens that end a model's replies."""

from typing import Any


def stop_token_ids(model: Any) -> tuple[int, ...]:
    """The ``eos_token_id`` of a model's ``generation_config``, of which there may be several.

    Chat models are trained to end replies with them; the tokenizer knows only one. Empty if the
    model has none. For ``SamplingParams.stop_token_ids`` and ``data.training_sample``.
    """
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
