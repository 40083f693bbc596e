"""Grades of a class.

>>> book = Book({"exam": 60, "homework": 40})
>>> book.record("ann", "exam", 90)
>>> book.record("ann", "homework", 80)
>>> book.record("ann", "homework", 100)
>>> book.score("ann")
90.0
>>> book.grade("ann")
'A'
>>> book.record("bob", "exam", 50)
>>> book.score("bob")
30.0
>>> book.grade("bob")
'F'
>>> book.record("bob", "homework", 75)
>>> book.score("bob")
60.0
>>> book.grade("bob")
'D'
>>> book.ranking()
['ann', 'bob']
>>> book.record("bob", "essay", 10)
ValueError
>>> book.record("bob", "exam", 101)
ValueError
>>> book.record("bob", "exam", -1)
ValueError

>>> Book({"exam": 50})
ValueError
>>> book = Book({"test": 100})
>>> book.record("cy", "test", 70)
>>> book.record("dan", "test", 80)
>>> book.record("eva", "test", 80)
>>> book.record("flo", "test", 100)
>>> book.ranking()
['flo', 'dan', 'eva', 'cy']
>>> book.mean()
82.5
>>> book.passed()
['cy', 'dan', 'eva', 'flo']
>>> book.distribution()
{'A': 1, 'B': 2, 'C': 1, 'D': 0, 'F': 0}

>>> letter(90)
'A'
>>> letter(89.9)
'B'
>>> letter(70)
'C'
>>> letter(60)
'D'
>>> letter(0)
'F'
>>> mean([])
0.0
>>> mean([1, 2])
1.5
>>> median([5, 1, 3])
3
>>> median([4, 1, 3, 2])
2.5
>>> spread([2, 9, 4])
7
>>> drop_lowest([3, 1, 2], 1)
[3, 2]
>>> drop_lowest([3, 1, 2], 0)
[3, 1, 2]
>>> drop_lowest([1, 1, 5], 1)
[1, 5]
"""

from grading_book.book import Book
from grading_book.scales import letter
from grading_book.statistics import drop_lowest, mean, median, spread

__all__ = ["Book", "drop_lowest", "letter", "mean", "median", "spread"]
