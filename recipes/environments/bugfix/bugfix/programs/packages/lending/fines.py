"""Fines for late books."""

DAYS = 14
CENTS = 10
MOST = 200


def days_late(lent, returned):
    """Days after the last one on which a book was to be returned."""
    return max(0, returned - lent - DAYS)


def fine(days):
    """The fine for a number of days, in cents."""
    if days <= 0:
        return 0
    return min(days * CENTS, MOST)
