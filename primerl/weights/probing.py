"""What engines say of fixed sequences."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

Probe = Mapping[str, Sequence[Mapping[str, Any]]]


@runtime_checkable
class Prober(Protocol):
    """An engine that scores fixed sequences, on each of its replicas."""

    def probe(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = ...,
        timeout_s: float = ...,
    ) -> Probe:
        """For each replica by name, for each sequence: ``scores[t]``, the logprob of each token
        given those before it (the first is 0), and the ``token_ids[n]`` with which it goes on, and
        their ``logprobs[n]``, without temperature.
        """
        ...


def probed(
    engine: Prober, sequences: Sequence[Sequence[int]], *, new_tokens: int, timeout_s: float
) -> list[dict[str, Any]]:
    """One row for each replica and sequence, as builtins; the tokens are those of both parts.

    Raises:
        RuntimeError: a replica answered with something else, or none did.
    """
    answer = engine.probe(sequences, max_new_tokens=new_tokens, timeout_s=timeout_s)
    if not answer:
        raise RuntimeError("the engine has no replica to probe")
    rows = []
    for replica, results in answer.items():
        for sequence, result in zip(sequences, results, strict=True):
            more = [int(token) for token in result["token_ids"]]
            logprobs = [float(one) for one in result["logprobs"]]
            scores = [float(one) for one in result["scores"]]
            if len(scores) != len(sequence) or len(logprobs) != len(more):
                raise RuntimeError(
                    f"{replica} gave {len(scores)} scores for {len(sequence)} tokens and "
                    f"{len(logprobs)} logprobs for {len(more)} new ones"
                )
            rows.append(
                {
                    "replica": replica,
                    "token_ids": [*sequence, *more],
                    "scores": scores,
                    "logprobs": logprobs,
                }
            )
    return rows
