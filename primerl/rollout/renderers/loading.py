"""Choice of the renderer for a tokenizer."""

from typing import Any

from primerl._common.optional import require
from primerl.rollout.renderers.chatml import chatml_renderer
from primerl.rollout.renderers.template import TemplateRenderer


def load_renderer(tokenizer: Any, chosen: Any = None) -> Any:
    """Return the renderer ``chosen``, or by default the one that fits the tokenizer best.

    ``chosen`` is a renderer, or a config for the ``renderers`` package. The default is the model's
    own renderer if ``renderers`` is installed and knows the model's name on the Hub; otherwise
    ``ChatMLRenderer`` for ChatML models, and ``TemplateRenderer`` for all others. Without a
    tokenizer, which engines that take messages do not need, the result is None.
    """
    if tokenizer is None:
        return None
    if chosen is None:
        return _known(tokenizer) or chatml_renderer(tokenizer) or TemplateRenderer(tokenizer)
    if hasattr(chosen, "render"):
        return chosen
    return require("renderers", extra="verifiers").create_renderer(tokenizer, chosen)


def _known(tokenizer: Any) -> Any:
    """Return the renderer that the ``renderers`` package has for this model, or None."""
    name = getattr(tokenizer, "name_or_path", "")
    if "/" not in name:
        return None  # no name on the Hub
    try:
        base = require("renderers.base", extra="verifiers")
    except ImportError:
        return None
    return base.create_renderer(tokenizer) if name in base.MODEL_RENDERER_MAP else None
