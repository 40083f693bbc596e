"""The catalog of the library."""


class Catalog:
    """Titles and copies by an id."""

    def __init__(self):
        self._titles = {}
        self._copies = {}

    def add(self, key, title, author, copies):
        """A new title."""
        if key in self._titles:
            raise ValueError(f"{key} is in use")
        self._titles[key] = (title, author)
        self._copies[key] = copies

    def free(self, key):
        """How many copies are there."""
        return self._copies[key]

    def take(self, key):
        """Take a copy; returns whether there was one."""
        if self._copies[key] == 0:
            return False
        self._copies[key] -= 1
        return True

    def put(self, key):
        """Bring a copy back."""
        self._copies[key] += 1

    def search(self, word):
        """The sorted titles with a word in the title or the author's name."""
        word = word.lower()
        found = []
        for title, author in self._titles.values():
            if word in title.lower() or word in author.lower():
                found.append(title)
        return sorted(found)
