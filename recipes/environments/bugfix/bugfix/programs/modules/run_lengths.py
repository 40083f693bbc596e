"""Simple codes for texts.

>>> encode("aaabcc")
'3a1b2c'
>>> encode("")
''
>>> encode("zzzzzzzzzzzz")
'12z'
>>> decode("3a1b2c")
'aaabcc'
>>> decode("12z")
'zzzzzzzzzzzz'
>>> decode("")
''
>>> caesar("abc xyz", 2)
'cde zab'
>>> caesar("Hello", 1)
'Ifmmp'
>>> caesar("cde zab", -2)
'abc xyz'
>>> vigenere("attack", "key")
'kxrkgi'
>>> vigenere("aaaa", "b")
'bbbb'
>>> binary("A")
'01000001'
>>> binary("Hi")
'01001000 01101001'
>>> text_of("01001000 01101001")
'Hi'
>>> checksum("abc")
14
>>> checksum("")
0
>>> checksum("ba")
4
"""


def encode(text):
    """Each run of a letter as its length and the letter."""
    parts = []
    start = 0
    for i in range(1, len(text) + 1):
        if i == len(text) or text[i] != text[start]:
            parts.append(f"{i - start}{text[start]}")
            start = i
    return "".join(parts)


def decode(code):
    """The text of ``encode``'s code."""
    text = ""
    count = 0
    for letter in code:
        if letter.isdigit():
            count = count * 10 + int(letter)
        else:
            text += letter * count
            count = 0
    return text


def shifted(letter, amount):
    """A letter some places later in the alphabet; others stay."""
    if not letter.isalpha():
        return letter
    first = ord("a") if letter.islower() else ord("A")
    return chr((ord(letter) - first + amount) % 26 + first)


def caesar(text, amount):
    """Each letter shifted by the same amount."""
    return "".join(shifted(letter, amount) for letter in text)


def vigenere(text, key):
    """Each letter shifted by the place of the key's next letter in the alphabet."""
    letters = []
    for i, letter in enumerate(text):
        amount = ord(key[i % len(key)]) - ord("a")
        letters.append(shifted(letter, amount))
    return "".join(letters)


def binary(text):
    """The letters as eight binary digits each."""
    return " ".join(format(ord(letter), "08b") for letter in text)


def text_of(digits):
    """The text of ``binary``'s digits."""
    return "".join(chr(int(part, 2)) for part in digits.split())


def checksum(text):
    """Places times letters: a is 1, b is 2, and the first place is 1."""
    total = 0
    for place, letter in enumerate(text, start=1):
        total += place * (ord(letter) - ord("a") + 1)
    return total
