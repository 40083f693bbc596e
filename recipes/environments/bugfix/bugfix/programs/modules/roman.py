"""Roman numerals.

>>> to_roman(4)
'IV'
>>> to_roman(9)
'IX'
>>> to_roman(14)
'XIV'
>>> to_roman(1990)
'MCMXC'
>>> to_roman(2024)
'MMXXIV'
>>> to_roman(3999)
'MMMCMXCIX'
>>> to_roman(0)
ValueError
>>> to_roman(4000)
ValueError
>>> from_roman("IV")
4
>>> from_roman("MCMXC")
1990
>>> from_roman("III")
3
>>> from_roman("xlii")
42
>>> from_roman("IIII")
ValueError
>>> from_roman("ABC")
ValueError
>>> is_roman("XII")
True
>>> is_roman("VX")
False
>>> add("IX", "III")
'XII'
"""

NUMERALS = (
    (1000, "M"),
    (900, "CM"),
    (500, "D"),
    (400, "CD"),
    (100, "C"),
    (90, "XC"),
    (50, "L"),
    (40, "XL"),
    (10, "X"),
    (9, "IX"),
    (5, "V"),
    (4, "IV"),
    (1, "I"),
)
LETTERS = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}


def to_roman(number):
    """The numeral of a number from 1 to 3999."""
    if number < 1 or number > 3999:
        raise ValueError(f"{number} has no numeral")
    text = ""
    for value, letters in NUMERALS:
        while number >= value:
            text += letters
            number -= value
    return text


def from_roman(text):
    """The number of a numeral."""
    text = text.upper()
    total = 0
    before = 0
    for letter in reversed(text):
        if letter not in LETTERS:
            raise ValueError(f"{letter!r} is no letter of numerals")
        value = LETTERS[letter]
        if value < before:
            total -= value
        else:
            total += value
            before = value
    if to_roman(total) != text:
        raise ValueError(f"{text!r} is not a proper numeral")
    return total


def is_roman(text):
    """Whether a text is a proper numeral."""
    try:
        from_roman(text)
    except ValueError:
        return False
    return True


def add(left, right):
    """The sum of two numerals."""
    return to_roman(from_roman(left) + from_roman(right))
