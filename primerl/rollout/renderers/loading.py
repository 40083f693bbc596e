"""The renderer of a tokenizer."""

from typing import Any

from primerl._common.optional import require
from primerl.rollout.renderers.chatml import chatml_renderer
from primerl.rollout.renderers.template import TemplateRenderer


def load_renderer(tokenizer: Any, chosen: Any = None) -> Any:
    """``chosen``, or by default the renderer that fits the tokenizer best.

    That is the model's own in ``renderers`` (if installed), by its name on the Hub; for ChatML's
    family ``ChatMLRenderer``; for any other the tokenizer's chat template. None without a
    tokenizer, which engines that take messages do not need.
    """
    if tokenizer is None:
        return None
    if chosen is None:
        return _known(tokenizer) or chatml_renderer(tokenizer) or TemplateRenderer(tokenizer)
    if hasattr(chosen, "render"):
        return chosen
    return require("renderers", extra="verifiers").create_renderer(tokenizer, chosen)


def _known(tokenizer: Any) -> Any:
    """The renderer of the ``renderers`` package that is made for this model; None if none is."""
    name = getattr(tokenizer, "name_or_path", "")
    if "/" not in name:
        return None  # no name on the Hub
    try:
        base = require("renderers.base", extra="verifiers")
    except ImportError:
        return None
    return base.create_renderer(tokenizer) if name in base.MODEL_RENDERER_MAP else None
