"""Generators of numbered problems: a text, its answer, and a program that prints the answer.

Where possible, the answer is computed in a different way from the program, so that agreement
between them confirms both.
"""

import math
import random
from collections.abc import Callable
from fractions import Fraction

import attrs

NAMES = ("Ana", "Ben", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana")
GOODS = ("apples", "pens", "books", "shells", "cards", "stamps")


@attrs.frozen
class Problem:
    """A problem. ``solution`` is Python code that prints the answer."""

    text: str
    answer: Fraction
    solution: str


Maker = Callable[[random.Random], Problem]


def shopping(chance: random.Random) -> Problem:
    """Make a problem about the total cost of two kinds of goods."""
    name = chance.choice(NAMES)
    first, second = chance.sample(GOODS, 2)
    a, b = chance.randint(2, 40), chance.randint(2, 40)
    p, q = chance.randint(1, 20), chance.randint(1, 20)
    text = (
        f"{name} buys {a} {first} for {p} coins each and {b} {second} for {q} coins each. "
        "How many coins is that?"
    )
    return Problem(text, Fraction(a * p + b * q), f"print({a} * {p} + {b} * {q})")


def sharing(chance: random.Random) -> Problem:
    """Make a problem about the remainder of a division."""
    people, each, rest = chance.randint(3, 12), chance.randint(5, 60), chance.randint(0, 2)
    total = people * each + rest
    what = chance.choice(GOODS)
    text = (
        f"{people} children share {total} {what} fairly, as many as possible each. "
        "How many are left over?"
    )
    return Problem(text, Fraction(rest), f"print({total} % {people})")


def travel(chance: random.Random) -> Problem:
    """Make a problem about a mean speed."""
    hours = [chance.randint(1, 6) for _ in range(2)]
    speeds = [chance.randint(20, 120) for _ in range(2)]
    distance = sum(h * s for h, s in zip(hours, speeds, strict=True))
    text = (
        f"A train runs {hours[0]} hours at {speeds[0]} km/h, then {hours[1]} hours at "
        f"{speeds[1]} km/h. What is its mean speed in km/h? Answer with a fraction if need be."
    )
    code = (
        "from fractions import Fraction\n"
        f"print(Fraction({hours[0]} * {speeds[0]} + {hours[1]} * {speeds[1]}, "
        f"{hours[0]} + {hours[1]}))"
    )
    return Problem(text, Fraction(distance, sum(hours)), code)


def ages(chance: random.Random) -> Problem:
    """Make a problem about ages, which is a linear equation."""
    younger, older = chance.sample(NAMES, 2)
    age, factor, years = chance.randint(4, 20), chance.randint(2, 4), chance.randint(2, 9)
    total = age + years + factor * age + years
    text = (
        f"{older} is {factor} times as old as {younger}. In {years} years they will be {total} "
        f"years old together. How old is {younger} now?"
    )
    code = f"print(next(x for x in range(200) if x + {years} + {factor} * x + {years} == {total}))"
    return Problem(text, Fraction(age), code)


def percentages(chance: random.Random) -> Problem:
    """Make a problem about two changes of a price in percent."""
    price = 100 * chance.randint(2, 50)
    up, down = 5 * chance.randint(1, 10), 5 * chance.randint(1, 10)
    text = (
        f"A price of {price} coins rises by {up} % and then falls by {down} %. What is it now? "
        "Answer with a decimal if need be."
    )
    answer = Fraction(price) * (100 + up) / 100 * (100 - down) / 100
    return Problem(text, answer, f"print({price} * {100 + up} * {100 - down} / 10000)")


def pens(chance: random.Random) -> Problem:
    """Make a problem about the heads and legs of hens and cows."""
    hens, cows = chance.randint(3, 60), chance.randint(3, 60)
    heads, legs = hens + cows, 2 * hens + 4 * cows
    text = f"Hens and cows have {heads} heads and {legs} legs together. How many hens are there?"
    code = f"print(next(h for h in range({heads} + 1) if 2 * h + 4 * ({heads} - h) == {legs}))"
    return Problem(text, Fraction(hens), code)


def primes(chance: random.Random) -> Problem:
    """Make a problem about a sum of primes."""
    low = chance.randint(10, 500)
    high = low + chance.randint(50, 400)
    sieve = bytearray([1]) * (high + 1)
    for number in range(2, math.isqrt(high) + 1):
        for multiple in range(number * number, high + 1, number):
            sieve[multiple] = 0
    answer = sum(number for number in range(low, high + 1) if sieve[number])
    code = (
        f"print(sum(n for n in range({low}, {high} + 1) "
        "if all(n % d for d in range(2, int(n ** 0.5) + 1))))"
    )
    return Problem(f"What is the sum of all primes from {low} to {high}?", Fraction(answer), code)


def multiples(chance: random.Random) -> Problem:
    """Make a problem about counting the numbers that a or b divides."""
    a, b = chance.sample(range(3, 20), 2)
    top = chance.randint(500, 5000)
    common = a * b // math.gcd(a, b)
    answer = top // a + top // b - top // common
    text = f"How many numbers from 1 to {top} are divisible by {a} or by {b}?"
    code = f"print(sum(n % {a} == 0 or n % {b} == 0 for n in range(1, {top} + 1)))"
    return Problem(text, Fraction(answer), code)


def powers(chance: random.Random) -> Problem:
    """Make a problem about the last digits of a large power."""
    base, exponent = chance.randint(3, 99), chance.randint(100, 999)
    digits = chance.randint(3, 5)
    text = f"What is the remainder of {base}^{exponent} divided by {10**digits}?"
    code = f"print({base} ** {exponent} % 10 ** {digits})"
    return Problem(text, Fraction(pow(base, exponent, 10**digits)), code)


def digits(chance: random.Random) -> Problem:
    """Make a problem about the digit sum of a multiple of a factorial."""
    n, factor = chance.randint(20, 120), chance.randint(2, 999)
    answer = sum(int(digit) for digit in str(factor * math.factorial(n)))
    code = f"import math\nprint(sum(map(int, str({factor} * math.factorial({n})))))"
    text = f"What is the sum of the digits of {factor} times {n}! (factorial)?"
    return Problem(text, Fraction(answer), code)


def grid(chance: random.Random) -> Problem:
    """Make a problem about counting the paths on a grid that avoid a point."""
    wide, high = chance.randint(4, 9), chance.randint(4, 9)
    x, y = chance.randint(1, wide - 1), chance.randint(1, high - 1)
    through = math.comb(x + y, x) * math.comb(wide - x + high - y, wide - x)
    text = (
        f"On a grid, how many ways lead from (0, 0) to ({wide}, {high}) by steps of one to the "
        f"right or up that never visit ({x}, {y})?"
    )
    code = (
        "from functools import cache\n@cache\ndef ways(a, b):\n"
        f"    if (a, b) == ({x}, {y}) or a < 0 or b < 0:\n        return 0\n"
        "    return 1 if a == b == 0 else ways(a - 1, b) + ways(a, b - 1)\n"
        f"print(ways({wide}, {high}))"
    )
    return Problem(text, Fraction(math.comb(wide + high, wide) - through), code)


def coins(chance: random.Random) -> Problem:
    """Make a problem about counting the ways to pay a sum with three coins."""
    values = sorted(chance.sample(range(2, 26), 3))
    total = chance.randint(60, 200)
    a, b, c = values
    answer = sum(
        (total - a * i - b * j) % c == 0
        for i in range(total // a + 1)
        for j in range((total - a * i) // b + 1)
    )
    text = f"In how many ways can {total} be paid with coins of {a}, {b} and {c}?"
    code = (
        f"ways = [1] + [0] * {total}\nfor coin in {values}:\n"
        f"    for n in range(coin, {total} + 1):\n        ways[n] += ways[n - coin]\n"
        f"print(ways[{total}])"
    )
    return Problem(text, Fraction(answer), code)


LEVELS: dict[int, tuple[Maker, ...]] = {
    1: (shopping, sharing, pens, ages),
    2: (travel, percentages, multiples, powers),
    3: (primes, digits, grid, coins),
}


def problem(number: int, *, level: int) -> Problem:
    """Return problem ``number`` of a level; the same number always gives the same problem."""
    chance = random.Random(f"{level}-{number}")
    makers = LEVELS[level]
    return makers[number % len(makers)](chance)
