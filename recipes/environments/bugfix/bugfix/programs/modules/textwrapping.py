"""Paragraphs of text.

>>> wrap("the quick brown fox", 10)
['the quick', 'brown fox']
>>> wrap("a bb ccc dddd", 4)
['a bb', 'ccc', 'dddd']
>>> wrap("", 5)
[]
>>> wrap("extraordinary day", 5)
['extraordinary', 'day']
>>> wrap("one two three", 13)
['one two three']
>>> justify("a b c", 9)
'a   b   c'
>>> justify("to be or", 11)
'to   be  or'
>>> justify("word", 8)
'word    '
>>> indent("x\\n\\ny", 2)
'  x\\n\\n  y'
>>> indent("one", 4)
'    one'
>>> shorten("a very long title", 10)
'a very...'
>>> shorten("short", 10)
'short'
>>> shorten("exactly 10", 10)
'exactly 10'
"""


def wrap(text, width):
    """Split text into lines of at most ``width`` characters; longer words keep their own line."""
    lines = []
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    if line:
        lines.append(line)
    return lines


def justify(text, width):
    """Spread the words of a line over ``width`` characters; the first gaps get the rest."""
    words = text.split()
    if len(words) < 2:
        return text.ljust(width)
    spaces = width - sum(len(word) for word in words)
    gaps = len(words) - 1
    line = ""
    for number, word in enumerate(words[:-1]):
        extra = 1 if number < spaces % gaps else 0
        line += word + " " * (spaces // gaps + extra)
    return line + words[-1]


def indent(text, count):
    """Put ``count`` spaces before each line that is not empty."""
    lines = text.split("\n")
    return "\n".join(" " * count + line if line else line for line in lines)


def shorten(text, width):
    """Cut text at a word, so that it and three dots have at most ``width`` characters."""
    if len(text) <= width:
        return text
    cut = text[: width - 2]
    return cut[: cut.rindex(" ")] + "..."
