"""A lending library.

>>> library = Library()
>>> library.catalog.add("b1", "Emma", "Austen", 2)
>>> library.catalog.add("b2", "Ulysses", "Joyce", 1)
>>> library.lend("ann", "b1", 0)
True
>>> library.lend("ann", "b2", 1)
True
>>> library.lend("bob", "b2", 2)
False
>>> library.loans_of("ann")
['b1', 'b2']
>>> library.give_back("ann", "b1", 14)
0
>>> library.give_back("ann", "b2", 20)
50
>>> library.lend("bob", "b2", 21)
True
>>> library.loans_of("ann")
[]
>>> library.debt("ann")
50
>>> library.lend("ann", "b1", 22)
True

>>> library = Library(most=1)
>>> library.catalog.add("x", "One", "A", 5)
>>> library.catalog.add("y", "Two", "B", 5)
>>> library.lend("cy", "x", 0)
True
>>> library.lend("cy", "y", 0)
False
>>> library.give_back("cy", "y", 3)
ValueError
>>> library.give_back("cy", "x", 40)
200
>>> library.lend("cy", "x", 41)
False
>>> library.pay("cy", 150)
50
>>> library.lend("cy", "x", 42)
True
>>> library.pay("cy", 60)
ValueError

>>> library = Library()
>>> library.catalog.add("p", "Persuasion", "Austen", 1)
>>> library.catalog.add("e", "Emma", "Austen", 1)
>>> library.catalog.add("d", "Dubliners", "Joyce", 1)
>>> library.catalog.search("austen")
['Emma', 'Persuasion']
>>> library.catalog.search("DUB")
['Dubliners']
>>> library.catalog.search("z")
[]
>>> library.catalog.add("p", "Again", "Who", 1)
ValueError
>>> library.catalog.free("e")
1
>>> library.overdue(100)
[]
>>> library.lend("dan", "e", 10)
True
>>> library.overdue(24)
[]
>>> library.overdue(25)
[('dan', 'e')]

>>> fine(3)
30
>>> fine(0)
0
>>> fine(-4)
0
>>> fine(100)
200
"""

from lending.catalog import Catalog
from lending.fines import fine
from lending.library import Library

__all__ = ["Catalog", "Library", "fine"]
