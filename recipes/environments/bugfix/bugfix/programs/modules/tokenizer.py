"""Arithmetic expressions: tokens, and their value.

>>> tokens("1 + 23*x")
[('number', '1'), ('sign', '+'), ('number', '23'), ('sign', '*'), ('name', 'x')]
>>> tokens("")
[]
>>> tokens("a1_b")
[('name', 'a1_b')]
>>> tokens("2 $ 3")
ValueError
>>> value("2 + 3 * 4")
14
>>> value("(2 + 3) * 4")
20
>>> value("10 - 4 - 3")
3
>>> value("-5 + 2")
-3
>>> value("7 / 2")
3.5
>>> value("2 * (3 - (1 + 1))")
2
>>> value("x * y", {"x": 6, "y": 7})
42
>>> value("(1 + 2")
ValueError
>>> value("1 2")
ValueError
>>> value("z")
KeyError
"""


def tokens(text):
    """Pairs of a kind (number, name, sign) and its text."""
    found = []
    i = 0
    while i < len(text):
        start = i
        if text[i] == " ":
            i += 1
            continue
        if text[i].isdigit():
            while i < len(text) and text[i].isdigit():
                i += 1
            found.append(("number", text[start:i]))
        elif text[i].isalpha():
            while i < len(text) and (text[i].isalnum() or text[i] == "_"):
                i += 1
            found.append(("name", text[start:i]))
        elif text[i] in "+-*/()":
            i += 1
            found.append(("sign", text[start:i]))
        else:
            raise ValueError(f"what is {text[i]!r}?")
    return found


def value(text, names=None):
    """The value of an expression; ``names`` has the values of its names."""
    parser = Parser(tokens(text), names or {})
    result = parser.sum()
    if parser.peek() is not None:
        raise ValueError(f"unexpected {parser.peek()!r}")
    return result


class Parser:
    """Reads one token after another."""

    def __init__(self, found, names):
        self.found = found
        self.names = names
        self.place = 0

    def peek(self):
        """The next token's text, or None at the end."""
        if self.place == len(self.found):
            return None
        return self.found[self.place][1]

    def take(self):
        """The next token."""
        if self.place == len(self.found):
            raise ValueError("the expression ends too early")
        self.place += 1
        return self.found[self.place - 1]

    def sum(self):
        """Terms with + and - between."""
        total = self.product()
        while self.peek() in ("+", "-"):
            _, sign = self.take()
            term = self.product()
            total = total + term if sign == "+" else total - term
        return total

    def product(self):
        """Factors with * and / between."""
        result = self.factor()
        while self.peek() in ("*", "/"):
            _, sign = self.take()
            factor = self.factor()
            result = result * factor if sign == "*" else result / factor
        return result

    def factor(self):
        """A number, a name, a sum in brackets, or one of them negative."""
        kind, text = self.take()
        if kind == "number":
            return int(text)
        if kind == "name":
            return self.names[text]
        if text == "-":
            return -self.factor()
        if text != "(":
            raise ValueError(f"unexpected {text!r}")
        result = self.sum()
        if self.take()[1] != ")":
            raise ValueError("a bracket is not closed")
        return result
