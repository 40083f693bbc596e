"""Probing engines with fixed sequences."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Prober(Protocol):
    """An engine that scores fixed sequences, on each of its replicas."""

    def probe(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = ...,
        temperatures: Sequence[float] = ...,
        timeout_s: float = ...,
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """For each replica by name, for each sequence: ``scores[t]``, the logprob of each token
        given those before it (the first is 0), at temperature 1; and the ``token_ids[n]`` with
        which it is continued, and their ``logprobs[n]``, sampled at the temperature of the sequence
        as rollouts are, and of the distribution that was sampled.
        """
        ...


@runtime_checkable
class WeightReader(Protocol):
    """An engine that reports the tensors it computes with; see ``served_tensors``."""

    def read_weights(
        self, names: Sequence[str], *, turn: int = ..., timeout_s: float = ...
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """For each replica by name, its readings of the published tensors ``names``."""
        ...


def probed(
    engine: Prober,
    sequences: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    temperatures: Sequence[float] | None = None,
    timeout_s: float,
) -> list[dict[str, Any]]:
    """One row for each replica and sequence, as builtins; the tokens are those of both parts.

    Raises:
        RuntimeError: an answer is malformed, or the engine has no replica.
    """
    if temperatures is None:
        temperatures = [1.0] * len(sequences)
    answer = engine.probe(
        sequences, max_new_tokens=new_tokens, temperatures=temperatures, timeout_s=timeout_s
    )
    if not answer:
        raise RuntimeError("the engine has no replica to probe")
    rows = []
    for replica, results in answer.items():
        for sequence, temperature, result in zip(sequences, temperatures, results, strict=True):
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
                    "temperature": temperature,
                }
            )
    return rows
