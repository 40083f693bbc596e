"""Dates of the Gregorian calendar as ``(year, month, day)``.

>>> days_in_month(2024, 2)
29
>>> days_in_month(1900, 2)
28
>>> days_in_month(2023, 4)
30
>>> days_in_month(2023, 12)
31
>>> day_of_year((2023, 3, 1))
60
>>> day_of_year((2024, 12, 31))
366
>>> day_of_year((2023, 1, 1))
1
>>> next_day((2023, 12, 31))
(2024, 1, 1)
>>> next_day((2024, 2, 28))
(2024, 2, 29)
>>> next_day((2023, 4, 30))
(2023, 5, 1)
>>> add_days((2023, 1, 30), 3)
(2023, 2, 2)
>>> add_days((2023, 6, 15), 0)
(2023, 6, 15)
>>> weekday((2024, 1, 1))
'Monday'
>>> weekday((2023, 12, 25))
'Monday'
>>> weekday((2000, 2, 29))
'Tuesday'
>>> weekday((1999, 12, 31))
'Friday'
>>> parse("2024-02-29")
(2024, 2, 29)
>>> parse("2023-02-29")
ValueError
>>> parse("2023-13-01")
ValueError
>>> parse("2023-1-0")
ValueError
"""

NAMES = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def is_leap(year):
    """Whether February has 29 days."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days_in_month(year, month):
    """How many days a month has."""
    if month == 2:
        return 29 if is_leap(year) else 28
    if month in (4, 6, 9, 11):
        return 30
    return 31


def day_of_year(date):
    """1 for the first of January."""
    year, month, day = date
    for earlier in range(1, month):
        day += days_in_month(year, earlier)
    return day


def next_day(date):
    """The day after."""
    year, month, day = date
    if day < days_in_month(year, month):
        return (year, month, day + 1)
    if month < 12:
        return (year, month + 1, 1)
    return (year + 1, 1, 1)


def add_days(date, count):
    """The date some days later."""
    for _ in range(count):
        date = next_day(date)
    return date


def weekday(date):
    """The name of the day of the week."""
    before = date[0] - 1
    days = 365 * before + before // 4 - before // 100 + before // 400
    return NAMES[(days + day_of_year(date) - 1) % 7]


def parse(text):
    """The date of a text such as 2024-02-29."""
    year, month, day = (int(part) for part in text.split("-"))
    if not 1 <= month <= 12 or not 1 <= day <= days_in_month(year, month):
        raise ValueError(f"there is no date {text}")
    return (year, month, day)
