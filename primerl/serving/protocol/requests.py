"""Request bodies for vLLM's token-in, token-out endpoint."""

from collections.abc import Mapping
from typing import Any

from primerl.types import SamplingParams

FIRST = -1  # the priority of requests that must not queue behind rollouts
LEAST_TEMPERATURE = 0.01  # vLLM raises lower temperatures to this


def generate_body(
    params: SamplingParams,
    *,
    salt: str,
    adapter: str | None = None,
    routes_start: int | None = None,
    priority: int = 0,
    transfer: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a request for one completion, without its prompt.

    Only ``max_tokens`` or a stop token ends the completion.

    Args:
        params: the sampling parameters.
        salt: prefixes are reused only among requests with the same salt.
        adapter: the server's name of the adapter to sample under, None for the server's own
            weights.
        routes_start: the first token whose expert routes the response is to have, for a server
            that returns routes; None for other servers.
        priority: smaller values are scheduled first.
        transfer: what a prefill server's response says about the prompt's keys and values.
    """
    sampling: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop_token_ids": params.stop_token_ids,
        "logprobs": 0,  # only the sampled token's
        "ignore_eos": True,
        "detokenize": False,
    }
    if params.min_p > 0:
        sampling["min_p"] = params.min_p
    if params.seed is not None:
        sampling["seed"] = params.seed
    if routes_start is not None:
        sampling["routed_experts_prompt_start"] = routes_start
    body: dict[str, Any] = {"sampling_params": sampling, "cache_salt": salt}
    body |= {} if adapter is None else {"model": adapter}
    body |= {} if transfer is None else {"kv_transfer_params": transfer}
    return body | ({"priority": priority} if priority else {})


def prefill_body(
    *, salt: str, adapter: str | None = None, routes_start: int | None = None
) -> dict[str, Any]:
    """Return a request to compute a prompt for another server, without the prompt.

    vLLM samples one token, too. The response has the parameters by which the other server loads the
    keys and values, if its connector needs any. The arguments are those of ``generate_body``.
    """
    params = SamplingParams(max_tokens=1, temperature=0)
    return generate_body(
        params,
        salt=salt,
        adapter=adapter,
        routes_start=routes_start,
        transfer={"do_remote_decode": True, "do_remote_prefill": False},
    )


def score_body(
    *,
    top_k: int = 0,
    salt: str | None = None,
    adapter: str | None = None,
    routes_start: int | None = None,
    priority: int = 0,
) -> dict[str, Any]:
    """Return a request for the logprobs of a prompt's tokens, without the prompt.

    vLLM does not read its prefix cache for them, but it caches the prompt for later requests with
    the same ``salt``. With ``top_k``, the response also has the logprobs of the likeliest tokens at
    each position. The other arguments are those of ``generate_body``.
    """
    sampling = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": top_k, "detokenize": False}
    if routes_start is not None:
        sampling["routed_experts_prompt_start"] = routes_start
    body: dict[str, Any] = {"sampling_params": sampling}
    body |= {} if salt is None else {"cache_salt": salt}
    body |= {} if adapter is None else {"model": adapter}
    return body | ({"priority": priority} if priority else {})
