"""Common English words."""

from importlib import resources


def words() -> list[str]:
    """Common English words of 3 to 5 lower-case letters, in a fixed shuffled order.

    Drawn from the SCOWL word lists, whose notice is in ``words.LICENSE`` beside them.
    """
    text = resources.files("primerl.testing").joinpath("words.txt").read_text(encoding="utf-8")
    return text.split()
