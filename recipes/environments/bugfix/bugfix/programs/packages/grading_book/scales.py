"""Letters for scores."""

LIMITS = (("A", 90), ("B", 80), ("C", 70), ("D", 60))
LETTERS = "ABCDF"
PASSING = 60


def letter(score):
    """The letter of a score."""
    for name, limit in LIMITS:
        if score >= limit:
            return name
    return "F"


def passes(score):
    """Whether a score is enough."""
    return score >= PASSING
