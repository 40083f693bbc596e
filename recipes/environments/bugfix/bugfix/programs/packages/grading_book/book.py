"""Scores by name and kind of work."""

from grading_book.scales import LETTERS, letter, passes
from grading_book.statistics import mean


class Book:
    """Weights of kinds of work are percentages."""

    def __init__(self, weights):
        if sum(weights.values()) != 100:
            raise ValueError("the weights have to add up to 100")
        self._weights = weights
        self._scores = {}

    def record(self, name, kind, score):
        """Note a score from 0 to 100."""
        if kind not in self._weights:
            raise ValueError(f"there is no {kind}")
        if score < 0 or score > 100:
            raise ValueError(f"{score} is no score")
        self._scores.setdefault(name, {}).setdefault(kind, []).append(score)

    def score(self, name):
        """The weighted mean; work that is missing counts as 0."""
        total = 0
        for kind, weight in self._weights.items():
            total += weight * mean(self._scores[name].get(kind, []))
        return total / 100

    def grade(self, name):
        """The letter of the score."""
        return letter(self.score(name))

    def ranking(self):
        """The names, the best first; equals in alphabetical order."""
        return sorted(self._scores, key=lambda name: (-self.score(name), name))

    def mean(self):
        """The mean of all scores."""
        return mean([self.score(name) for name in self._scores])

    def passed(self):
        """The sorted names of who has passed."""
        return sorted(name for name in self._scores if passes(self.score(name)))

    def distribution(self):
        """How often there is each letter."""
        counts = dict.fromkeys(LETTERS, 0)
        for name in self._scores:
            counts[self.grade(name)] += 1
        return counts
