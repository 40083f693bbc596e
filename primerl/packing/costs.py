"""The cost of a document, by which packs are balanced over ranks."""

import functools
import logging
from collections.abc import Callable
from typing import Any

from primerl import flops
from primerl._common.ranks import is_first_rank

log = logging.getLogger(__name__)


def document_cost(config: Any) -> Callable[..., Any] | None:
    """Return the cost of a document for ``pack``: the FLOPs of training a model on it.

    Returns None, so that ``pack`` counts tokens, if the FLOPs of the model are not counted. Rank 0
    logs the reason as a warning, once for each reason.

    Args:
        config: a Hugging Face config, as for ``flops.training``.
    """
    try:
        flops.training(config, 1)
    except ValueError as error:
        if is_first_rank():
            _warn(str(error))
        return None
    return functools.partial(flops.training, config)


@functools.cache
def _warn(reason: str) -> None:
    log.warning("packs are balanced by tokens instead of FLOPs: %s", reason)
