"""Sets of numbers as sorted intervals ``(start, end)``, the end excluded.

>>> merge([(1, 3), (2, 5), (7, 8)])
[(1, 5), (7, 8)]
>>> merge([(5, 6), (1, 2)])
[(1, 2), (5, 6)]
>>> merge([(1, 2), (2, 3)])
[(1, 3)]
>>> merge([(1, 10), (2, 3)])
[(1, 10)]
>>> merge([])
[]
>>> covered([(1, 3), (2, 5), (7, 8)])
5
>>> covered([])
0
>>> contains([(1, 3), (5, 9)], 1)
True
>>> contains([(1, 3), (5, 9)], 3)
False
>>> contains([(1, 3), (5, 9)], 8)
True
>>> intersect([(1, 5), (8, 12)], [(3, 9)])
[(3, 5), (8, 9)]
>>> intersect([(1, 2)], [(2, 3)])
[]
>>> intersect([(0, 4), (6, 10)], [(1, 2), (3, 7)])
[(1, 2), (3, 4), (6, 7)]
>>> gaps([(1, 3), (5, 6)], 0, 10)
[(0, 1), (3, 5), (6, 10)]
>>> gaps([(0, 10)], 0, 10)
[]
>>> gaps([], 2, 4)
[(2, 4)]
"""


def merge(intervals):
    """The union, as few intervals as possible."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def covered(intervals):
    """How many numbers are in at least one interval."""
    total = 0
    for start, end in merge(intervals):
        total += end - start
    return total


def contains(intervals, number):
    """Whether a number is in an interval."""
    return any(start <= number < end for start, end in intervals)


def intersect(left, right):
    """Return the intersection of two sorted lists of intervals."""
    found = []
    i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        if start < end:
            found.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def gaps(intervals, start, end):
    """Return the gaps between ``start`` and ``end``."""
    free = []
    position = start
    for left, right in merge(intervals):
        if left > position:
            free.append((position, left))
        position = max(position, right)
    if position < end:
        free.append((position, end))
    return free
