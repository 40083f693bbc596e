"""``ConnectionSettings``, the options of an engine's connection to its servers."""

import attrs

from primerl.rollout.engines.protocol import RouteStore
from primerl.serving.client.routing import RoutingPolicy
from primerl.serving.protocol.labels import Labels

ON_UPDATE = {
    "recompute": "mode=keep&clear_cache=true",
    "keep": "mode=keep&clear_cache=false",
    "drain": "mode=wait&clear_cache=true",
}


@attrs.frozen(kw_only=True)
class ConnectionSettings:
    """``VLLMEngine``'s arguments of the same names, and the labels of its run's weights."""

    labels: Labels
    api_key: str | None
    on_update: str
    request_timeout_s: float
    down_timeout_s: float
    retries: int
    routes: RouteStore | None
    vocab_size: int | None
    prefill_from: int
    routing: RoutingPolicy

    def __attrs_post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.isprintable():
            raise ValueError(
                "the api_key has characters that an HTTP header can't hold; expected printable ones"
            )
        if self.on_update not in ON_UPDATE:
            raise ValueError(
                f"on_update={self.on_update!r}; expected one of {', '.join(ON_UPDATE)}"
            )
        if self.routes is not None and not isinstance(self.routes, RouteStore):
            raise ValueError(
                f"routes is a {type(self.routes).__name__}, expected a store with put() and check()"
            )
        if not callable(self.routing):
            raise ValueError(
                f"routing is {self.routing!r:.80}, expected a function (request, places) -> (url, "
                "rank), such as serving.prefix_aware"
            )
        if self.retries < 0:
            raise ValueError(f"retries is {self.retries}, expected at least 0")
        for name in ("request_timeout_s", "down_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a positive time")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"vocab_size is {self.vocab_size}, expected at least 1")
        if self.prefill_from < 1:
            raise ValueError(f"prefill_from is {self.prefill_from}, expected at least 1")
