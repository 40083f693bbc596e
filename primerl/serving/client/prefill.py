"""Prompts that prefill servers compute; the servers that sample load their keys and values."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs
import numpy as np

from primerl.rollout.engines.contract import BadCompletion
from primerl.rollout.processes.running_clock import running_time
from primerl.serving.client.expert_routes import CacheSources, RouteWriter
from primerl.serving.client.fleet import Fleet
from primerl.serving.client.routing import RoutedRequest
from primerl.serving.client.servers import ServerState
from primerl.serving.client.session_prompts import SessionPrompt, SessionPrompts
from primerl.serving.protocol import requests, responses
from primerl.types import PolicyVersion, SamplingParams

SKEW_S = 10.0  # how long a request waits until servers of both roles have the same weights
SKEW_POLL_S = 0.05
PARAMETERS_BYTES = 16  # bound on a prompt token's share of the transfer parameters

log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True, eq=False)
class Prefill:
    """A prompt that a server has computed for another."""

    version: PolicyVersion
    """The version of the weights that computed it."""
    transfer: dict[str, Any] | None
    """What the other server needs to load keys and values; None if it finds them by itself."""
    rows: np.ndarray | None
    """The expert routes of the prompt's tokens from ``routes_start`` on."""


class BadPrefill(BadCompletion):
    """A prefill server's response breaks the contract of engines, or lacks expert routes."""


class _Updated(Exception):
    """Signal that a prefill server computed a prompt with other weights than expected."""


class PrefillServers:
    """Sender of prompts to the prefill servers of a fleet; used on its event loop.

    Args:
        fleet: the servers.
        recorder: the recorder of expert routes; None if they are not recorded.
        sources: the servers' KV connectors.
        ask: a function that sends a request body for a prompt to a server and returns the response,
            or None if the server failed.
    """

    def __init__(
        self,
        fleet: Fleet,
        recorder: RouteWriter | None,
        sources: CacheSources,
        ask: Callable[..., Awaitable[responses.Response | None]],
    ) -> None:
        self._fleet = fleet
        self._recorder = recorder
        self._sources = sources
        self._ask = ask
        self._prompts = SessionPrompts()

    async def prefill(
        self,
        server: ServerState,
        prompt: SessionPrompt,
        request: RoutedRequest,
        params: SamplingParams,
        hashes: Sequence[int],
    ) -> Prefill | None:
        """Have a prompt computed for ``server``; return None if ``server`` is to compute it.

        It does if too few tokens are new to it, or if no prefill server is there or answers. If the
        servers have different weights during an update, it does at once without expert routes, and
        otherwise after ``SKEW_S``.

        Raises:
            BadPrefill: the prefill server's response is wrong.
            RuntimeError: the two servers can't share keys and values.
        """
        new = request.tokens - (prompt.held_tokens if prompt.held_by == server.url else 0)
        if self._recorder is None and new < self._fleet.settings.prefill_from:
            return None
        deadline = running_time() + SKEW_S
        while server.alive:
            label = server.label
            chosen = self._fleet.servers.choose_prefill(request, label=label, hashes=hashes)
            if chosen is None and not self._fleet.servers.prefill_differs(label):
                return None
            if chosen is not None:
                await self._sources.refuse_mismatch(chosen[0], server)
                if not chosen[0].alive:  # it was lost when it was asked
                    continue
                with self._prompts.sent(request.session, prompt.token_ids) as sent:
                    try:
                        return await self._computed(*chosen, sent, params, hashes, label)
                    except _Updated:
                        log.info("%s was updated while it computed a prompt", chosen[0].url)
                    except BadCompletion as error:
                        where = "" if chosen[0].url in str(error) else f"{chosen[0].url}: "
                        self._fleet.request_failed(chosen[0], f"{where}{error}")
                        raise BadPrefill(f"{where}{error}") from error
            # Without the other server's expert routes, the rollout could not be replayed.
            if self._recorder is None or running_time() > deadline:
                log.info("%s and the prefill servers have different weights", server.url)
                return None
            await asyncio.sleep(SKEW_POLL_S)
        return None

    async def _computed(
        self,
        source: ServerState,
        rank: int | None,
        prompt: SessionPrompt,
        params: SamplingParams,
        hashes: Sequence[int],
        label: str | None,
    ) -> Prefill | None:
        length = len(prompt.token_ids)
        expected = routes_start = None
        if self._recorder is not None:
            routes_start = params.routes_start
            expected = self._recorder.expect(length, attrs.evolve(params, max_tokens=1))
        adapter = self._fleet.adapter_of(source)
        body = requests.prefill_body(salt=label or "", adapter=adapter, routes_start=routes_start)
        max_bytes = responses.most_bytes(1) + PARAMETERS_BYTES * length
        response = await self._ask(
            source, prompt, body, max_bytes, expected, rank=rank, hashes=hashes
        )
        if response is None:
            return None
        choice = response.choices[0]
        if choice.finish_reason != "length":
            return None
        if len(choice.token_ids) != 1:
            raise BadCompletion(f"it sampled {len(choice.token_ids)} tokens after a prompt, not 1")
        versions = responses.token_versions(choice, self._fleet.number, adapter=adapter)
        if versions != [self._fleet.number(label)]:
            await self._fleet.poll(source)
            raise _Updated
        rows = None
        if expected is not None:
            rows = await expected.rows(choice)
            count, sent = length - params.routes_start, 0 if rows is None else len(rows)
            if sent != count:
                raise BadCompletion(
                    f"{source.url} sent expert routes of {sent} tokens of a prompt, expected "
                    f"{count}"
                )
            # The server that samples computes the last token itself, and has its routes.
            rows = rows[:-1] if rows is not None and count else None
        self._fleet.answered(source)
        return Prefill(version=versions[0] or 0, transfer=response.kv_transfer_params, rows=rows)
