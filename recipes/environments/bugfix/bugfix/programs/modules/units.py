"""Quantities with units, and how people write them.

>>> convert(2, "km", "m")
2000.0
>>> convert(500, "g", "kg")
0.5
>>> convert(3, "h", "min")
180.0
>>> convert(1, "km", "kg")
ValueError
>>> convert(1, "mile", "m")
KeyError
>>> parse_quantity("12 km")
(12.0, 'km')
>>> parse_quantity("3.5kg")
(3.5, 'kg')
>>> parse_quantity("min")
ValueError
>>> human_size(512)
'512 B'
>>> human_size(1024)
'1.0 KiB'
>>> human_size(1536)
'1.5 KiB'
>>> human_size(5 * 1024 * 1024)
'5.0 MiB'
>>> human_time(59)
'59s'
>>> human_time(60)
'1m 0s'
>>> human_time(3725)
'1h 2m 5s'
>>> human_time(7200)
'2h 0m 0s'
>>> add_quantities("1 km", "500 m")
'1500.0 m'
>>> add_quantities("2 h", "30 min")
'150.0 min'
"""

UNITS = {
    "m": ("length", 1),
    "km": ("length", 1000),
    "cm": ("length", 0.01),
    "g": ("mass", 1),
    "kg": ("mass", 1000),
    "s": ("time", 1),
    "min": ("time", 60),
    "h": ("time", 3600),
}


def convert(amount, unit, target):
    """An amount in another unit."""
    kind, factor = UNITS[unit]
    target_kind, target_factor = UNITS[target]
    if kind != target_kind:
        raise ValueError(f"{unit} is a {kind}, {target} a {target_kind}")
    return amount * factor / target_factor


def parse_quantity(text):
    """The amount and the unit of a text."""
    digits = 0
    while digits < len(text) and (text[digits].isdigit() or text[digits] == "."):
        digits += 1
    if digits == 0:
        raise ValueError(f"{text!r} begins with no number")
    return float(text[:digits]), text[digits:].strip()


def human_size(count):
    """Bytes in the largest unit of which there is at least one."""
    if count < 1024:
        return f"{count} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def human_time(seconds):
    """Hours, minutes and seconds; those before the first that is not zero are left out."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours > 0:
        return f"{hours}h {minutes}m {seconds}s"
    if minutes > 0:
        return f"{minutes}m {seconds}s"
    return f"{seconds}s"


def add_quantities(left, right):
    """The sum of two quantities, in the unit of the second."""
    amount, unit = parse_quantity(left)
    other, target = parse_quantity(right)
    return f"{convert(amount, unit, target) + other} {target}"
