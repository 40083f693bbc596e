"""A small search engine.

>>> index = Index()
>>> index.add(1, "The cat sat on the mat.")
>>> index.add(2, "A dog and a cat!")
>>> index.add(3, "Dogs, dogs, dogs")
>>> index.search("cat")
[1, 2]
>>> index.search("dog")
[3, 2]
>>> index.search("cat dog")
[2]
>>> index.search("cat OR mat")
[1, 2]
>>> index.search("mat OR dogs")
[3, 1, 2]
>>> index.search("bird")
[]
>>> index.search("the")
[]
>>> index.count("dog")
4
>>> index.remove(3)
True
>>> index.remove(3)
False
>>> index.search("dog")
[2]
>>> index.count("dog")
1
>>> len(index)
2

>>> index = Index()
>>> index.add("x", "one two three two")
>>> index.add("x", "four")
>>> index.search("two")
[]
>>> index.search("FOUR")
['x']
>>> len(index)
1
>>> index.suggest("fo")
['four']
>>> index.add("y", "fox forest four")
>>> index.suggest("fo")
['four', 'forest', 'fox']
>>> index.suggest("fo", 2)
['four', 'forest']
>>> index.suggest("zz")
[]

>>> words("It's 5 o'clock, Dogs!")
['it', '5', 'clock', 'dog']
>>> words("")
[]
>>> stem("dogs")
'dog'
>>> stem("is")
'is'
>>> stem("glass")
'glass'
>>> snippet("one two three four five", "three", 1)
'...two three four...'
>>> snippet("one two three", "one", 1)
'one two...'
>>> snippet("one two three", "three", 5)
'one two three'
>>> snippet("one two", "nine", 1)
''
"""

from text_index.index import Index
from text_index.snippets import snippet
from text_index.words import stem, words

__all__ = ["Index", "snippet", "stem", "words"]
