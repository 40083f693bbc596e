"""Small functions: each is a program of the easiest tier, and its examples are the hidden tests."""


def clamp(x, low, high):
    """Limit x to the range from low to high.

    >>> clamp(5, 0, 3)
    3
    >>> clamp(-2, 0, 3)
    0
    >>> clamp(2, 0, 3)
    2
    >>> clamp(9, 4, 6)
    6
    >>> clamp(1, 4, 6)
    4
    >>> clamp(5, 4, 6)
    5
    """
    if x < low:
        return low
    if x > high:
        return high
    return x


def total_price(price, count, shipping):
    """Price of count items, plus shipping.

    >>> total_price(10, 3, 5)
    35
    >>> total_price(2, 4, 1)
    9
    >>> total_price(7, 0, 4)
    4
    >>> total_price(1, 1, 0)
    1
    >>> total_price(12, 2, 9)
    33
    >>> total_price(3, 5, 2)
    17
    """
    return price * count + shipping


def is_even(n):
    """Whether n is even.

    >>> is_even(4)
    True
    >>> is_even(7)
    False
    >>> is_even(0)
    True
    >>> is_even(-3)
    False
    >>> is_even(12)
    True
    >>> is_even(15)
    False
    """
    return n % 2 == 0


def count_above(numbers, limit):
    """How many numbers are greater than limit.

    >>> count_above([1, 5, 9], 4)
    2
    >>> count_above([3, 3, 3], 3)
    0
    >>> count_above([], 1)
    0
    >>> count_above([7, 8, 2, 9], 7)
    2
    >>> count_above([5], 1)
    1
    >>> count_above([4, 6, 6, 1], 5)
    2
    """
    count = 0
    for number in numbers:
        if number > limit:
            count += 1
    return count


def largest(numbers):
    """The largest of some numbers.

    >>> largest([3, 9, 2])
    9
    >>> largest([-5, -2, -7])
    -2
    >>> largest([4])
    4
    >>> largest([1, 2, 3])
    3
    >>> largest([8, 1, 6])
    8
    >>> largest([0, 10, 5])
    10
    """
    best = numbers[0]
    for number in numbers:
        if number > best:
            best = number
    return best


def smallest(numbers):
    """The smallest of some numbers.

    >>> smallest([3, 9, 2])
    2
    >>> smallest([-5, -2, -7])
    -7
    >>> smallest([4])
    4
    >>> smallest([1, 2, 3])
    1
    >>> smallest([8, 1, 6])
    1
    >>> smallest([6, 10, 5])
    5
    """
    best = numbers[0]
    for number in numbers:
        if number < best:
            best = number
    return best


def add_all(numbers):
    """The sum of some numbers.

    >>> add_all([1, 2, 3])
    6
    >>> add_all([])
    0
    >>> add_all([10])
    10
    >>> add_all([5, -2])
    3
    >>> add_all([4, 4, 4, 4])
    16
    >>> add_all([100, 23])
    123
    """
    total = 0
    for number in numbers:
        total += number
    return total


def product(numbers):
    """The product of some numbers.

    >>> product([2, 3])
    6
    >>> product([])
    1
    >>> product([7])
    7
    >>> product([2, 2, 2])
    8
    >>> product([5, 0])
    0
    >>> product([3, 4, 5])
    60
    """
    result = 1
    for number in numbers:
        result *= number
    return result


def average(numbers):
    """The mean of some numbers.

    >>> average([2, 4])
    3.0
    >>> average([5])
    5.0
    >>> average([1, 2, 3, 4])
    2.5
    >>> average([10, 20, 30])
    20.0
    >>> average([0, 1])
    0.5
    >>> average([7, 7, 7])
    7.0
    """
    return sum(numbers) / len(numbers)


def rectangle_area(width, height):
    """The area of a rectangle.

    >>> rectangle_area(3, 4)
    12
    >>> rectangle_area(1, 9)
    9
    >>> rectangle_area(5, 5)
    25
    >>> rectangle_area(7, 0)
    0
    >>> rectangle_area(6, 2)
    12
    >>> rectangle_area(10, 3)
    30
    """
    return width * height


def perimeter(width, height):
    """The length of a rectangle's border.

    >>> perimeter(3, 4)
    14
    >>> perimeter(1, 9)
    20
    >>> perimeter(5, 5)
    20
    >>> perimeter(7, 0)
    14
    >>> perimeter(6, 2)
    16
    >>> perimeter(10, 3)
    26
    """
    return 2 * (width + height)


def absolute(x):
    """The distance of x from zero.

    >>> absolute(-4)
    4
    >>> absolute(4)
    4
    >>> absolute(0)
    0
    >>> absolute(-1)
    1
    >>> absolute(13)
    13
    >>> absolute(-20)
    20
    """
    if x < 0:
        return -x
    return x


def sign(x):
    """1 for a positive number, -1 for a negative one, else 0.

    >>> sign(5)
    1
    >>> sign(-5)
    -1
    >>> sign(0)
    0
    >>> sign(1)
    1
    >>> sign(-1)
    -1
    >>> sign(99)
    1
    """
    if x > 0:
        return 1
    if x < 0:
        return -1
    return 0


def celsius(fahrenheit):
    """Degrees Celsius of degrees Fahrenheit.

    >>> celsius(32)
    0.0
    >>> celsius(212)
    100.0
    >>> celsius(50)
    10.0
    >>> celsius(-40)
    -40.0
    >>> celsius(68)
    20.0
    >>> celsius(104)
    40.0
    """
    return (fahrenheit - 32) * 5 / 9


def fahrenheit(celsius):
    """Degrees Fahrenheit of degrees Celsius.

    >>> fahrenheit(0)
    32.0
    >>> fahrenheit(100)
    212.0
    >>> fahrenheit(10)
    50.0
    >>> fahrenheit(-40)
    -40.0
    >>> fahrenheit(20)
    68.0
    >>> fahrenheit(5)
    41.0
    """
    return celsius * 9 / 5 + 32


def seconds(hours, minutes):
    """How many seconds there are in hours and minutes.

    >>> seconds(1, 0)
    3600
    >>> seconds(0, 1)
    60
    >>> seconds(2, 30)
    9000
    >>> seconds(0, 0)
    0
    >>> seconds(1, 15)
    4500
    >>> seconds(10, 5)
    36300
    """
    return hours * 3600 + minutes * 60


def is_leap(year):
    """Whether a year has 366 days.

    >>> is_leap(2024)
    True
    >>> is_leap(2023)
    False
    >>> is_leap(1900)
    False
    >>> is_leap(2000)
    True
    >>> is_leap(2100)
    False
    >>> is_leap(1996)
    True
    """
    if year % 400 == 0:
        return True
    if year % 100 == 0:
        return False
    return year % 4 == 0


def initials(first, last):
    """The first letters of two names.

    >>> initials("ada", "byron")
    'AB'
    >>> initials("Alan", "Turing")
    'AT'
    >>> initials("grace", "Hopper")
    'GH'
    >>> initials("Zoe", "young")
    'ZY'
    >>> initials("li", "wei")
    'LW'
    >>> initials("Max", "born")
    'MB'
    """
    return (first[0] + last[0]).upper()


def last_word(text):
    """The last word of a text.

    >>> last_word("the red fox")
    'fox'
    >>> last_word("hello")
    'hello'
    >>> last_word("one two")
    'two'
    >>> last_word("a b c d")
    'd'
    >>> last_word("it is late")
    'late'
    >>> last_word("go home now")
    'now'
    """
    return text.split()[-1]


def first_words(text, count):
    """The first words of a text.

    >>> first_words("the red fox", 2)
    'the red'
    >>> first_words("one two three four", 3)
    'one two three'
    >>> first_words("hello world", 1)
    'hello'
    >>> first_words("a b c", 0)
    ''
    >>> first_words("a b", 5)
    'a b'
    >>> first_words("it is very late", 2)
    'it is'
    """
    words = text.split()
    return " ".join(words[:count])


def is_palindrome(text):
    """Whether a text reads the same backwards.

    >>> is_palindrome("level")
    True
    >>> is_palindrome("hello")
    False
    >>> is_palindrome("Anna")
    True
    >>> is_palindrome("ab")
    False
    >>> is_palindrome("noon")
    True
    >>> is_palindrome("tree")
    False
    """
    text = text.lower()
    return text == text[::-1]


def count_vowels(text):
    """How many vowels a text has.

    >>> count_vowels("hello")
    2
    >>> count_vowels("sky")
    0
    >>> count_vowels("Apple")
    2
    >>> count_vowels("queue")
    4
    >>> count_vowels("banana")
    3
    >>> count_vowels("rhythm is")
    1
    """
    count = 0
    for letter in text.lower():
        if letter in "aeiou":
            count += 1
    return count


def middle(numbers):
    """The middle one of an odd number of sorted numbers.

    >>> middle([3, 1, 2])
    2
    >>> middle([5])
    5
    >>> middle([9, 8, 7, 1, 2])
    7
    >>> middle([10, 30, 20])
    20
    >>> middle([4, 4, 5])
    4
    >>> middle([6, 1, 9, 3, 5])
    5
    """
    ordered = sorted(numbers)
    return ordered[len(ordered) // 2]


def factorial(n):
    """The product of all integers from 1 to n.

    >>> factorial(0)
    1
    >>> factorial(1)
    1
    >>> factorial(3)
    6
    >>> factorial(4)
    24
    >>> factorial(5)
    120
    >>> factorial(6)
    720
    """
    result = 1
    for i in range(1, n + 1):
        result *= i
    return result


def triangle(n):
    """The sum of all integers from 1 to n.

    >>> triangle(1)
    1
    >>> triangle(4)
    10
    >>> triangle(0)
    0
    >>> triangle(10)
    55
    >>> triangle(7)
    28
    >>> triangle(100)
    5050
    """
    return n * (n + 1) // 2


def power(base, exponent):
    """base to the power of a natural exponent.

    >>> power(2, 3)
    8
    >>> power(5, 0)
    1
    >>> power(3, 2)
    9
    >>> power(10, 4)
    10000
    >>> power(7, 1)
    7
    >>> power(1, 9)
    1
    """
    result = 1
    for _ in range(exponent):
        result *= base
    return result


def fibonacci(n):
    """The n-th number of 0, 1, 1, 2, 3, 5, ...

    >>> fibonacci(0)
    0
    >>> fibonacci(1)
    1
    >>> fibonacci(2)
    1
    >>> fibonacci(6)
    8
    >>> fibonacci(7)
    13
    >>> fibonacci(10)
    55
    """
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def is_prime(n):
    """Whether n is a prime number.

    >>> is_prime(2)
    True
    >>> is_prime(9)
    False
    >>> is_prime(1)
    False
    >>> is_prime(13)
    True
    >>> is_prime(25)
    False
    >>> is_prime(4)
    False
    >>> is_prime(29)
    True
    """
    for i in range(2, n):
        if n % i == 0:
            return False
    return n > 1


def gcd(a, b):
    """The greatest common divisor.

    >>> gcd(12, 18)
    6
    >>> gcd(7, 3)
    1
    >>> gcd(10, 5)
    5
    >>> gcd(9, 0)
    9
    >>> gcd(100, 75)
    25
    >>> gcd(8, 20)
    4
    """
    while b > 0:
        a, b = b, a % b
    return a


def digit_sum(n):
    """The sum of the digits of n.

    >>> digit_sum(123)
    6
    >>> digit_sum(9)
    9
    >>> digit_sum(0)
    0
    >>> digit_sum(405)
    9
    >>> digit_sum(9999)
    36
    >>> digit_sum(70)
    7
    """
    total = 0
    while n > 0:
        total += n % 10
        n //= 10
    return total


def without(items, unwanted):
    """The items but for the unwanted one.

    >>> without([1, 2, 3, 2], 2)
    [1, 3]
    >>> without(["a", "b"], "c")
    ['a', 'b']
    >>> without([], 1)
    []
    >>> without([5, 5], 5)
    []
    >>> without([0, 1], 0)
    [1]
    >>> without([4, 7, 9], 9)
    [4, 7]
    """
    return [item for item in items if item != unwanted]


def evens(numbers):
    """The even ones of some numbers.

    >>> evens([1, 2, 3, 4])
    [2, 4]
    >>> evens([5, 7])
    []
    >>> evens([0, 8])
    [0, 8]
    >>> evens([])
    []
    >>> evens([11, 12, 13])
    [12]
    >>> evens([6, 9, 10])
    [6, 10]
    """
    return [number for number in numbers if number % 2 == 0]


def squares(n):
    """The squares of the first n natural numbers.

    >>> squares(3)
    [1, 4, 9]
    >>> squares(1)
    [1]
    >>> squares(0)
    []
    >>> squares(5)
    [1, 4, 9, 16, 25]
    >>> squares(2)
    [1, 4]
    >>> squares(4)
    [1, 4, 9, 16]
    """
    return [i * i for i in range(1, n + 1)]


def countdown(n):
    """The numbers from n down to 1.

    >>> countdown(3)
    [3, 2, 1]
    >>> countdown(1)
    [1]
    >>> countdown(0)
    []
    >>> countdown(5)
    [5, 4, 3, 2, 1]
    >>> countdown(2)
    [2, 1]
    >>> countdown(4)
    [4, 3, 2, 1]
    """
    return list(range(n, 0, -1))


def discount(price, percent):
    """A price reduced by a percentage.

    >>> discount(100, 10)
    90.0
    >>> discount(50, 50)
    25.0
    >>> discount(80, 25)
    60.0
    >>> discount(10, 0)
    10.0
    >>> discount(40, 100)
    0.0
    >>> discount(60, 50)
    30.0
    """
    return price - price * percent / 100


def with_tax(price, percent):
    """A price with a tax of a percentage added.

    >>> with_tax(100, 10)
    110.0
    >>> with_tax(50, 50)
    75.0
    >>> with_tax(80, 25)
    100.0
    >>> with_tax(10, 0)
    10.0
    >>> with_tax(40, 100)
    80.0
    >>> with_tax(60, 50)
    90.0
    """
    return price + price * percent / 100


def grade(score):
    """The grade of a score: A from 90, B from 70, else C.

    >>> grade(95)
    'A'
    >>> grade(90)
    'A'
    >>> grade(80)
    'B'
    >>> grade(70)
    'B'
    >>> grade(69)
    'C'
    >>> grade(89)
    'B'
    >>> grade(10)
    'C'
    """
    if score >= 90:
        return "A"
    if score >= 70:
        return "B"
    return "C"


def ticket(age):
    """The price of a ticket: 0 below 6 years, 5 below 18, else 10.

    >>> ticket(3)
    0
    >>> ticket(6)
    5
    >>> ticket(5)
    0
    >>> ticket(17)
    5
    >>> ticket(18)
    10
    >>> ticket(40)
    10
    """
    if age < 6:
        return 0
    if age < 18:
        return 5
    return 10


def between(x, low, high):
    """Whether x lies from low to high, both included.

    >>> between(3, 1, 5)
    True
    >>> between(1, 1, 5)
    True
    >>> between(5, 1, 5)
    True
    >>> between(0, 1, 5)
    False
    >>> between(6, 1, 5)
    False
    >>> between(4, 4, 4)
    True
    """
    return x >= low and x <= high


def outside(x, low, high):
    """Whether x is below low or above high.

    >>> outside(3, 1, 5)
    False
    >>> outside(1, 1, 5)
    False
    >>> outside(5, 1, 5)
    False
    >>> outside(0, 1, 5)
    True
    >>> outside(6, 1, 5)
    True
    >>> outside(9, 4, 4)
    True
    """
    return x < low or x > high


def distance(a, b):
    """How far two numbers are from each other.

    >>> distance(3, 8)
    5
    >>> distance(8, 3)
    5
    >>> distance(4, 4)
    0
    >>> distance(-2, 2)
    4
    >>> distance(10, 1)
    9
    >>> distance(0, 7)
    7
    """
    if a > b:
        return a - b
    return b - a


def starts_upper(text):
    """Whether a text begins with a capital letter.

    >>> starts_upper("Hello")
    True
    >>> starts_upper("hello")
    False
    >>> starts_upper("")
    False
    >>> starts_upper("aB")
    False
    >>> starts_upper("Cd")
    True
    >>> starts_upper("zed")
    False
    """
    return text != "" and text[0].isupper()


def repeat(text, times):
    """A text repeated with dashes between.

    >>> repeat("ab", 2)
    'ab-ab'
    >>> repeat("x", 3)
    'x-x-x'
    >>> repeat("no", 1)
    'no'
    >>> repeat("a", 0)
    ''
    >>> repeat("ha", 4)
    'ha-ha-ha-ha'
    >>> repeat("q", 2)
    'q-q'
    """
    return "-".join([text] * times)


def shout(text):
    """A text in capital letters with an exclamation mark.

    >>> shout("hello")
    'HELLO!'
    >>> shout("Go")
    'GO!'
    >>> shout("")
    '!'
    >>> shout("stop now")
    'STOP NOW!'
    >>> shout("yes")
    'YES!'
    >>> shout("aB")
    'AB!'
    """
    return text.upper() + "!"


def ends_with_s(words):
    """The words that end with an s.

    >>> ends_with_s(["cats", "dog"])
    ['cats']
    >>> ends_with_s(["sun", "bus"])
    ['bus']
    >>> ends_with_s([])
    []
    >>> ends_with_s(["a", "b"])
    []
    >>> ends_with_s(["as", "is"])
    ['as', 'is']
    >>> ends_with_s(["sea", "seas"])
    ['seas']
    """
    return [word for word in words if word.endswith("s")]


def longest(words):
    """The first of the longest words.

    >>> longest(["a", "ccc", "bb"])
    'ccc'
    >>> longest(["one", "two"])
    'one'
    >>> longest(["x"])
    'x'
    >>> longest(["it", "rains", "today"])
    'rains'
    >>> longest(["long", "a", "b"])
    'long'
    >>> longest(["a", "bb", "cc"])
    'bb'
    """
    best = ""
    for word in words:
        if len(word) > len(best):
            best = word
    return best


def index_of(items, wanted):
    """The place of the first item that is wanted, or -1.

    >>> index_of([5, 6, 7], 6)
    1
    >>> index_of([5, 6, 7], 9)
    -1
    >>> index_of(["a", "a"], "a")
    0
    >>> index_of([], 1)
    -1
    >>> index_of([1, 2, 3, 4], 4)
    3
    >>> index_of([9, 8], 9)
    0
    """
    for i in range(len(items)):
        if items[i] == wanted:
            return i
    return -1


def pairs_equal(numbers):
    """How many neighbours are equal.

    >>> pairs_equal([1, 1, 2])
    1
    >>> pairs_equal([3, 3, 3])
    2
    >>> pairs_equal([1, 2, 3])
    0
    >>> pairs_equal([])
    0
    >>> pairs_equal([5, 5, 6, 6])
    2
    >>> pairs_equal([7])
    0
    """
    count = 0
    for i in range(1, len(numbers)):
        if numbers[i] == numbers[i - 1]:
            count += 1
    return count


def differences(numbers):
    """Each number minus the one before it.

    >>> differences([1, 4, 9])
    [3, 5]
    >>> differences([5])
    []
    >>> differences([2, 2])
    [0]
    >>> differences([10, 7])
    [-3]
    >>> differences([0, 1, 3, 6])
    [1, 2, 3]
    >>> differences([8, 9])
    [1]
    """
    return [numbers[i] - numbers[i - 1] for i in range(1, len(numbers))]


def running_total(numbers):
    """The sums of the numbers so far.

    >>> running_total([1, 2, 3])
    [1, 3, 6]
    >>> running_total([])
    []
    >>> running_total([5])
    [5]
    >>> running_total([4, -1])
    [4, 3]
    >>> running_total([2, 2, 2])
    [2, 4, 6]
    >>> running_total([10, 1])
    [10, 11]
    """
    totals = []
    total = 0
    for number in numbers:
        total += number
        totals.append(total)
    return totals


def all_positive(numbers):
    """Whether all numbers are greater than zero.

    >>> all_positive([1, 2])
    True
    >>> all_positive([1, -2])
    False
    >>> all_positive([0])
    False
    >>> all_positive([])
    True
    >>> all_positive([5, 6, 7])
    True
    >>> all_positive([-1, 3])
    False
    """
    return all(number > 0 for number in numbers)


def any_negative(numbers):
    """Whether a number is less than zero.

    >>> any_negative([1, 2])
    False
    >>> any_negative([1, -2])
    True
    >>> any_negative([0])
    False
    >>> any_negative([])
    False
    >>> any_negative([-5, -6])
    True
    >>> any_negative([0, -1, 3])
    True
    """
    return any(number < 0 for number in numbers)


def second(items, default):
    """The second item, or a default.

    >>> second([1, 2, 3], 0)
    2
    >>> second([1], 0)
    0
    >>> second([], 9)
    9
    >>> second(["a", "b"], "x")
    'b'
    >>> second([4, 5], 7)
    5
    >>> second([6], 8)
    8
    """
    if len(items) < 2:
        return default
    return items[1]


def swap_ends(items):
    """The items with the first and the last one exchanged.

    >>> swap_ends([1, 2, 3])
    [3, 2, 1]
    >>> swap_ends([1, 2])
    [2, 1]
    >>> swap_ends([7])
    [7]
    >>> swap_ends(["a", "b", "c", "d"])
    ['d', 'b', 'c', 'a']
    >>> swap_ends([0, 5, 6, 9])
    [9, 5, 6, 0]
    >>> swap_ends([4, 8, 2])
    [2, 8, 4]
    """
    items = list(items)
    items[0], items[-1] = items[-1], items[0]
    return items


def chunks(items, size):
    """The items in lists of a size; the last one may be shorter.

    >>> chunks([1, 2, 3, 4], 2)
    [[1, 2], [3, 4]]
    >>> chunks([1, 2, 3], 2)
    [[1, 2], [3]]
    >>> chunks([], 2)
    []
    >>> chunks([1, 2], 1)
    [[1], [2]]
    >>> chunks([1, 2, 3], 5)
    [[1, 2, 3]]
    >>> chunks([4, 5, 6, 7, 8, 9], 3)
    [[4, 5, 6], [7, 8, 9]]
    """
    return [items[i : i + size] for i in range(0, len(items), size)]


def rotate(items, count):
    """The items with the first ones moved to the end.

    >>> rotate([1, 2, 3], 1)
    [2, 3, 1]
    >>> rotate([1, 2, 3], 0)
    [1, 2, 3]
    >>> rotate([1, 2, 3, 4], 2)
    [3, 4, 1, 2]
    >>> rotate(["a", "b"], 1)
    ['b', 'a']
    >>> rotate([5, 6, 7], 2)
    [7, 5, 6]
    >>> rotate([8, 9], 2)
    [8, 9]
    """
    return items[count:] + items[:count]


def change(paid, price):
    """Return the change, or 0 if too little was paid.

    >>> change(10, 7)
    3
    >>> change(5, 5)
    0
    >>> change(3, 8)
    0
    >>> change(20, 1)
    19
    >>> change(100, 45)
    55
    >>> change(1, 2)
    0
    """
    return max(paid - price, 0)


def capped(speed, limit):
    """A speed, but at most the limit.

    >>> capped(80, 50)
    50
    >>> capped(30, 50)
    30
    >>> capped(50, 50)
    50
    >>> capped(0, 10)
    0
    >>> capped(12, 10)
    10
    >>> capped(99, 100)
    99
    """
    return min(speed, limit)


def boxes(items, size):
    """How many boxes of a size hold the items.

    >>> boxes(10, 5)
    2
    >>> boxes(11, 5)
    3
    >>> boxes(0, 5)
    0
    >>> boxes(1, 5)
    1
    >>> boxes(12, 4)
    3
    >>> boxes(13, 4)
    4
    """
    return (items + size - 1) // size


def minutes_late(due, arrived):
    """How many minutes after the due time one arrived; 0 if in time.

    >>> minutes_late(10, 15)
    5
    >>> minutes_late(10, 8)
    0
    >>> minutes_late(30, 30)
    0
    >>> minutes_late(0, 7)
    7
    >>> minutes_late(45, 60)
    15
    >>> minutes_late(20, 1)
    0
    """
    if arrived > due:
        return arrived - due
    return 0


def valid_password(text):
    """Whether a password has at least 6 characters and a digit.

    >>> valid_password("abc123")
    True
    >>> valid_password("abcdef")
    False
    >>> valid_password("a1")
    False
    >>> valid_password("longer9")
    True
    >>> valid_password("12345")
    False
    >>> valid_password("x2345678")
    True
    """
    return len(text) >= 6 and any(letter.isdigit() for letter in text)


def can_vote(age, citizen):
    """Whether somebody may vote: citizens of at least 18 years.

    >>> can_vote(20, True)
    True
    >>> can_vote(20, False)
    False
    >>> can_vote(18, True)
    True
    >>> can_vote(17, True)
    False
    >>> can_vote(3, False)
    False
    >>> can_vote(65, True)
    True
    """
    return age >= 18 and citizen


def free_shipping(price, member):
    """Whether shipping is free: from a price of 50, or for members.

    >>> free_shipping(60, False)
    True
    >>> free_shipping(50, False)
    True
    >>> free_shipping(49, False)
    False
    >>> free_shipping(10, True)
    True
    >>> free_shipping(10, False)
    False
    >>> free_shipping(80, True)
    True
    """
    return price >= 50 or member


def word_lengths(text):
    """The lengths of the words of a text.

    >>> word_lengths("a bb ccc")
    [1, 2, 3]
    >>> word_lengths("")
    []
    >>> word_lengths("hello")
    [5]
    >>> word_lengths("to be or")
    [2, 2, 2]
    >>> word_lengths("red car")
    [3, 3]
    >>> word_lengths("we are here")
    [2, 3, 4]
    """
    return [len(word) for word in text.split()]


def count_letter(text, letter):
    """How often a letter occurs in a text.

    >>> count_letter("banana", "a")
    3
    >>> count_letter("hello", "z")
    0
    >>> count_letter("", "a")
    0
    >>> count_letter("aaa", "a")
    3
    >>> count_letter("look", "o")
    2
    >>> count_letter("tree", "t")
    1
    """
    count = 0
    for one in text:
        if one == letter:
            count += 1
    return count


def dot(a, b):
    """The sum of the products of two lists' numbers.

    >>> dot([1, 2], [3, 4])
    11
    >>> dot([], [])
    0
    >>> dot([5], [2])
    10
    >>> dot([1, 0], [0, 1])
    0
    >>> dot([2, 2, 2], [1, 2, 3])
    12
    >>> dot([-1, 4], [3, 3])
    9
    """
    return sum(x * y for x, y in zip(a, b))


def scale(numbers, factor):
    """Each number times a factor.

    >>> scale([1, 2], 3)
    [3, 6]
    >>> scale([], 2)
    []
    >>> scale([5], 0)
    [0]
    >>> scale([4, 6], 2)
    [8, 12]
    >>> scale([1, 1, 1], 7)
    [7, 7, 7]
    >>> scale([-2, 3], 5)
    [-10, 15]
    """
    return [number * factor for number in numbers]


def shift(numbers, amount):
    """Each number plus an amount.

    >>> shift([1, 2], 3)
    [4, 5]
    >>> shift([], 2)
    []
    >>> shift([5], 0)
    [5]
    >>> shift([4, 6], -2)
    [2, 4]
    >>> shift([1, 1, 1], 7)
    [8, 8, 8]
    >>> shift([-2, 3], 5)
    [3, 8]
    """
    return [number + amount for number in numbers]


def speed(distance, hours):
    """Distance per hour, or 0 in no time.

    >>> speed(100, 2)
    50.0
    >>> speed(30, 3)
    10.0
    >>> speed(7, 0)
    0
    >>> speed(0, 5)
    0.0
    >>> speed(45, 1)
    45.0
    >>> speed(10, 4)
    2.5
    """
    if hours == 0:
        return 0
    return distance / hours


def bmi(weight, height):
    """Weight divided by the square of the height.

    >>> bmi(80, 2)
    20.0
    >>> bmi(50, 1)
    50.0
    >>> bmi(100, 2)
    25.0
    >>> bmi(63, 3)
    7.0
    >>> bmi(10, 2)
    2.5
    >>> bmi(36, 2)
    9.0
    """
    return weight / (height * height)


def odds(n):
    """The odd numbers below n.

    >>> odds(6)
    [1, 3, 5]
    >>> odds(1)
    []
    >>> odds(2)
    [1]
    >>> odds(8)
    [1, 3, 5, 7]
    >>> odds(7)
    [1, 3, 5]
    >>> odds(0)
    []
    """
    return list(range(1, n, 2))


def multiples(number, count):
    """The first multiples of a number.

    >>> multiples(3, 4)
    [3, 6, 9, 12]
    >>> multiples(5, 1)
    [5]
    >>> multiples(2, 0)
    []
    >>> multiples(7, 2)
    [7, 14]
    >>> multiples(1, 3)
    [1, 2, 3]
    >>> multiples(10, 3)
    [10, 20, 30]
    """
    return [number * i for i in range(1, count + 1)]


def share(total, people):
    """Return the share of each, and the remainder.

    >>> share(10, 3)
    (3, 1)
    >>> share(8, 4)
    (2, 0)
    >>> share(5, 7)
    (0, 5)
    >>> share(17, 5)
    (3, 2)
    >>> share(0, 2)
    (0, 0)
    >>> share(23, 6)
    (3, 5)
    """
    return total // people, total % people


def weekday(start, days):
    """The day of the week, from 0 to 6, some days after a start.

    >>> weekday(0, 3)
    3
    >>> weekday(5, 4)
    2
    >>> weekday(6, 1)
    0
    >>> weekday(2, 14)
    2
    >>> weekday(1, 0)
    1
    >>> weekday(3, 10)
    6
    """
    return (start + days) % 7


def bounded_sum(a, b, limit):
    """The sum of two numbers, but at most the limit.

    >>> bounded_sum(2, 3, 10)
    5
    >>> bounded_sum(8, 3, 10)
    10
    >>> bounded_sum(5, 5, 10)
    10
    >>> bounded_sum(0, 1, 4)
    1
    >>> bounded_sum(7, 9, 12)
    12
    >>> bounded_sum(1, 2, 3)
    3
    """
    total = a + b
    if total > limit:
        return limit
    return total


def overlap(start, end, other_start, other_end):
    """Whether two spans of time overlap; touching is not overlapping.

    >>> overlap(1, 5, 4, 8)
    True
    >>> overlap(1, 3, 3, 6)
    False
    >>> overlap(1, 2, 5, 6)
    False
    >>> overlap(5, 9, 1, 6)
    True
    >>> overlap(2, 8, 3, 4)
    True
    >>> overlap(6, 9, 2, 6)
    False
    """
    return start < other_end and other_start < end
