"""The number that a reply gives as its answer.

Only known words may stand beside the number. All other text might change its meaning, as in "12
fifths" or "anything but 12", and then the answer is not read.
"""

import re
from fractions import Fraction

from python_math.problems import GOODS, NAMES

MOST_CHARACTERS = 100  # per answer


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BEFORE = _words(  # before the number, in lower case
    """
    altogether answer are average costs equals exactly final get gives has have he hence in is it
    mean now number price remainder result she simply so speed sum the their there therefore they
    thus total value was we
    """
) | {name.lower() for name in NAMES}
_UNITS = _words(
    """
    km m cm dm mm mi ft in yd mph kmh kph kg g mg t lb oz l ml s h min ms
    kilometers kilometres meters metres centimeters centimetres miles feet inches
    kilograms grams liters litres seconds minutes hour hours day days weeks months year years
    degrees percent dollar dollars euro euros pounds cent cents coin coins usd eur points unit units
    hen hens cow cows child children people heads legs ways paths routes
    numbers integers multiples primes digits left old
    """
) | {*GOODS, *(good.removesuffix("s") for good in GOODS)}
_AFTER = _UNITS | _words("altogether are each in now old over per remain square there total")
_BESIDE = _BEFORE | _UNITS | {"of"}  # on the other side of "="
_ANSWER = re.compile(r"answer\s*:\s*([^\n]*)", re.IGNORECASE)
_SAID = re.compile(r"answer\s+is\b\s*([^\n]*)", re.IGNORECASE)
_MINUS = str.maketrans(dict.fromkeys("\u2212\u2013\ufe63\uff0d", "-"))
# Markup is removed, in this order; what remains of it makes an answer unreadable.
_MARKUP = (
    (re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r" \1/\2 "),
    (re.compile(r"\\(?:boxed|fbox|text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}?"), r" \1 "),
    (re.compile(r"(?<=\d)(?:\{,\}|\\[,;!]|[\u00a0\u2009\u202f_'])(?=\d{3}(?!\d))"), ","),
    (re.compile(r"\\(?:times|cdot)\b"), "*"),
    (re.compile(r"\\[()\[\],;!]|\\(?=[%$])|[$€£`\[\]{}]|\*\*|__|[\u2705\u2713\u2714\ufe0f]"), " "),
)
_LETTERS = "[^\\W\\d_\u00b2\u00b3\u00b9\u2070-\u209f\u00bc-\u00be\u2150-\u218b]+"
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_UNIT = rf"(?:(?:[cdkm]?m|ft|in|s)\^?[23\u00b2\u00b3]|{_LETTERS}(?![\d^]))"
_ALONE = re.compile(
    rf"(?P<before>(?:{_LETTERS}[\s,:]+)*)"
    rf"(?P<number>[+-]?\s?(?:{_NUMBER})(?:\s*/\s*\d+)?)(?![\d,]*\d)"
    rf"\s*(?:%|\u00b0?\s*(?P<after>(?:{_UNIT}(?:[\s/\u00b7-]+{_UNIT})*)?))[\s.,;:]*"
)
_REMARK = re.compile(r"\s+\(|,?\s(?=(?:since|because)\b)")
_REASON = re.compile(r"\s*(?:since|because)\b", re.IGNORECASE)  # says nothing about the answer
_START = re.compile(r"\s*(?:as|so|i\.e\.,?)?\s*", re.IGNORECASE)
_EQUALS = re.compile(r"\s*(?:=|\bis\b|\bequals\b)\s*", re.IGNORECASE)
_TERM = re.compile(rf"[\d\s.+*/^()\u00d7\u00b7\u00f7-]*|{_LETTERS}(?:\s+{_LETTERS})*\s*")


def answered(reply: str) -> Fraction | None:
    """Parse the exact number after the last "Answer:"; None if there is not exactly one number.

    The number is an integer, a decimal or a fraction, possibly with commas between thousands, a
    unit, and TeX or Markdown around it. An equation may lead to it, or follow it as a reason.
    Expressions are not evaluated, so no reply can make parsing slow.
    """
    found = _ANSWER.findall(reply) or _SAID.findall(reply)
    if not found:
        return None
    text = found[-1][:MOST_CHARACTERS].translate(_MINUS)
    for markup, replacement in _MARKUP:
        text = markup.sub(replacement, text)
    text = text.strip(" *_\t\r")
    if not re.search(r"\d!", text):
        text = text.rstrip("!")
    if text.startswith("(") and text.rstrip(" .").endswith(")"):
        text = text.strip(" .()")
    main, *rest = _REMARK.split(text, maxsplit=1)
    value = _value_of_equation(main)
    for remark in rest:
        if _REASON.match(remark):
            continue
        if _value_of_equation(_START.sub("", remark.rstrip(" .)"), count=1)) != value:
            return None
    return value


def _value_of_equation(text: str) -> Fraction | None:
    """Return the number on the right of all "="; None if another side is a different number."""
    *sides, last = _EQUALS.split(text)
    value = _value(last)
    for side in sides:
        other = _value(side)
        if other is None and not _is_term(side):
            return None
        if other is not None and other != value:
            return None
    return value


def _is_term(text: str) -> bool:
    """Whether a text is arithmetic of numbers, a variable, or words that name the number."""
    is_variable = len(text) == 1 and text.isalpha()
    return _TERM.fullmatch(text) is not None and (is_variable or _are_known(text.lower(), _BESIDE))


def _are_known(text: str, known: frozenset[str]) -> bool:
    """Whether all words of a text are known. Short units have no capitals: 12M is no length."""
    words = re.findall(_LETTERS, text)
    return all((word.lower() if len(word) > 2 else word) in known for word in words)


def _value(text: str) -> Fraction | None:
    found = _ALONE.fullmatch(text.strip())
    if found is None or not _are_known(found["after"] or "", _AFTER):
        return None
    if not _are_known(found["before"].lower(), _BEFORE):
        return None
    try:
        return Fraction(re.sub(r"[,\s]", "", found["number"]).replace("./", "/"))
    except (ValueError, ZeroDivisionError):
        return None
