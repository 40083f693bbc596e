"""The metrics of a vLLM server, in Prometheus text format."""

import re
from collections.abc import Collection, Iterable, Iterator

_ENGINE = re.compile(r'[{,]engine="(\d+)"')
_LEFT_OUT = ("_bucket", "_created", "_info")


def totals(text: str) -> dict[str, float]:
    """Return counters and gauges by name, summed over all labels."""
    return _summed((name, value) for name, _, value in _samples(text.splitlines()))


def by_rank(text: str, *, names: Collection[str] = ()) -> dict[int, dict[str, float]]:
    """Return the counters and gauges of each data-parallel rank, by rank and name.

    They are those with the label ``engine``, summed over the other labels.

    Args:
        text: the page.
        names: the metrics to return, which is faster than to return all, the default.
    """
    starts = tuple(f"{name}{{" for name in names) or ("",)
    lines = [line for line in text.splitlines() if line.startswith(starts)]
    ranks: dict[int, list[tuple[str, float]]] = {}
    for name, labels, value in _samples(lines):
        if engine := _ENGINE.search(labels):
            ranks.setdefault(int(engine[1]), []).append((name, value))
    return {rank: _summed(iter(samples)) for rank, samples in sorted(ranks.items())}


def _samples(lines: Iterable[str]) -> Iterator[tuple[str, str, float]]:
    """Yield name, labels and value of each counter and gauge."""
    for line in lines:
        labelled, _, value = line.rpartition(" ")
        name, brace, labels = labelled.partition("{")
        if not name or line.startswith("#") or name.endswith(_LEFT_OUT):
            continue
        try:
            yield name, brace + labels, float(value)
        except ValueError:
            continue  # a line of a later version of the format


def _summed(samples: Iterator[tuple[str, float]]) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, value in samples:
        values[name] = values.get(name, 0.0) + value
    return values
