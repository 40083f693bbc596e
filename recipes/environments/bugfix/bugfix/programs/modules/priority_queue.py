"""A priority queue on a binary heap.

>>> queue = PriorityQueue()
>>> queue.push("low", 5)
>>> queue.push("high", 1)
>>> queue.push("mid", 3)
>>> queue.peek()
'high'
>>> queue.pop()
'high'
>>> queue.pop()
'mid'
>>> len(queue)
1
>>> queue.pop()
'low'
>>> queue.pop()
IndexError

>>> queue = PriorityQueue()
>>> queue.push("first", 2)
>>> queue.push("second", 2)
>>> queue.push("third", 2)
>>> queue.drain()
['first', 'second', 'third']
>>> len(queue)
0

>>> heap_sort([5, 2, 9, 1, 5, 6])
[1, 2, 5, 5, 6, 9]
>>> heap_sort([])
[]
>>> heap_sort([3, 2, 1, 0, -1, -2, -3])
[-3, -2, -1, 0, 1, 2, 3]

>>> smallest([9, 4, 7, 1], 2)
[1, 4]
>>> smallest([2], 3)
[2]
>>> smallest([8, 8, 3, 5], 3)
[3, 5, 8]
"""


class PriorityQueue:
    """Items with the least priority first; of equals, the one that was pushed first."""

    def __init__(self):
        self._heap = []
        self._count = 0

    def __len__(self):
        return len(self._heap)

    def push(self, item, priority):
        """Add an item."""
        self._heap.append((priority, self._count, item))
        self._count += 1
        self._rise(len(self._heap) - 1)

    def peek(self):
        """The first item, which stays."""
        return self._heap[0][2]

    def pop(self):
        """Remove the first item and return it."""
        if not self._heap:
            raise IndexError("the queue is empty")
        first = self._heap[0]
        last = self._heap.pop()
        if self._heap:
            self._heap[0] = last
            self._sink(0)
        return first[2]

    def drain(self):
        """Remove all items, in their order."""
        items = []
        while self._heap:
            items.append(self.pop())
        return items

    def _rise(self, place):
        while place > 0:
            parent = (place - 1) // 2
            if self._heap[parent] <= self._heap[place]:
                return
            self._swap(parent, place)
            place = parent

    def _sink(self, place):
        while True:
            least = place
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(self._heap) and self._heap[child] < self._heap[least]:
                    least = child
            if least == place:
                return
            self._swap(least, place)
            place = least

    def _swap(self, one, other):
        self._heap[one], self._heap[other] = self._heap[other], self._heap[one]


def heap_sort(numbers):
    """The numbers in rising order."""
    queue = PriorityQueue()
    for number in numbers:
        queue.push(number, number)
    return queue.drain()


def smallest(numbers, count):
    """The ``count`` smallest numbers."""
    return heap_sort(numbers)[:count]
