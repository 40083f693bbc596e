"""An index from words to texts."""

from text_index.words import words


class Index:
    """Counts of words by text."""

    def __init__(self):
        self._counts = {}

    def __len__(self):
        return len(self._counts)

    def add(self, key, text):
        """Add a text, in place of an earlier one with this key."""
        counts = {}
        for word in words(text):
            counts[word] = counts.get(word, 0) + 1
        self._counts[key] = counts

    def remove(self, key):
        """Remove a text; returns whether it was there."""
        if key not in self._counts:
            return False
        del self._counts[key]
        return True

    def count(self, word):
        """How often a word occurs in all texts."""
        return sum(counts.get(word, 0) for counts in self._counts.values())

    def search(self, query):
        """The texts with all the words, or with one of those around OR; the best first."""
        parts = [words(part) for part in query.split(" OR ")]
        scores = {}
        for key, counts in self._counts.items():
            for part in parts:
                if part and all(word in counts for word in part):
                    found = sum(counts[word] for word in part)
                    scores[key] = scores.get(key, 0) + found
        return sorted(scores, key=lambda key: -scores[key])

    def suggest(self, start, most=3):
        """The words that begin like this, the most frequent first, then alphabetically."""
        totals = {}
        for counts in self._counts.values():
            for word, count in counts.items():
                if word.startswith(start):
                    totals[word] = totals.get(word, 0) + count
        return sorted(totals, key=lambda word: (-totals[word], word))[:most]
