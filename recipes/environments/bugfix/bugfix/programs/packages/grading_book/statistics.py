"""Numbers that sum up others."""


def mean(numbers):
    """The mean, 0 of nothing."""
    if not numbers:
        return 0.0
    return sum(numbers) / len(numbers)


def median(numbers):
    """The middle, or the mean of the two in the middle."""
    ordered = sorted(numbers)
    half = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


def spread(numbers):
    """The largest minus the smallest."""
    return max(numbers) - min(numbers)


def drop_lowest(numbers, count):
    """The numbers in their order without the lowest ones."""
    kept = list(numbers)
    for _ in range(count):
        kept.remove(min(kept))
    return kept
