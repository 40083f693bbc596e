"""A cache that forgets what was not used for longest.

>>> cache = LRUCache(2)
>>> cache.put("a", 1)
>>> cache.put("b", 2)
>>> cache.get("a")
1
>>> cache.put("c", 3)
>>> cache.get("b")
>>> cache.get("a")
1
>>> cache.get("c")
3
>>> cache.keys()
['a', 'c']

>>> small = LRUCache(1)
>>> small.put("x", 1)
>>> small.put("x", 2)
>>> small.get("x")
2
>>> len(small)
1
>>> small.put("y", 5)
>>> small.get("x", "gone")
'gone'

>>> counted = LRUCache(3)
>>> counted.put(1, "one")
>>> counted.get(1)
'one'
>>> counted.get(2)
>>> counted.get(1)
'one'
>>> counted.hit_rate()
0.667
>>> LRUCache(5).hit_rate()
0.0

>>> LRUCache(0)
ValueError

>>> full = LRUCache(2)
>>> full.put(1, 1)
>>> full.put(2, 2)
>>> full.put(1, 10)
>>> full.put(3, 3)
>>> full.keys()
[1, 3]
>>> full.remove(1)
True
>>> full.remove(7)
False
>>> len(full)
1
"""


class LRUCache:
    """Holds ``capacity`` values by key."""

    def __init__(self, capacity):
        if capacity < 1:
            raise ValueError("the capacity must be positive")
        self._capacity = capacity
        self._values = {}
        self._hits = 0
        self._misses = 0

    def __len__(self):
        return len(self._values)

    def get(self, key, default=None):
        """The value of a key, which is then the last used."""
        if key not in self._values:
            self._misses += 1
            return default
        self._hits += 1
        value = self._values.pop(key)
        self._values[key] = value
        return value

    def put(self, key, value):
        """Set a value; the one that was not used for longest may go."""
        if key in self._values:
            del self._values[key]
        elif len(self._values) >= self._capacity:
            oldest = next(iter(self._values))
            del self._values[oldest]
        self._values[key] = value

    def remove(self, key):
        """Forget a key; returns whether it was there."""
        if key not in self._values:
            return False
        del self._values[key]
        return True

    def keys(self):
        """All keys, the last used one last."""
        return list(self._values)

    def hit_rate(self):
        """The share of ``get`` calls that found a value, to three digits."""
        calls = self._hits + self._misses
        if calls == 0:
            return 0.0
        return round(self._hits / calls, 3)
