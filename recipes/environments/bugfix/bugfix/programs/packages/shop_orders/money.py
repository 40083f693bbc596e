"""Amounts in cents."""


def euros(cents):
    """An amount as people write it."""
    return f"{cents // 100}.{cents % 100:02d}"


def rounded(amount, divisor):
    """An amount divided, rounded half up."""
    return (2 * amount + divisor) // (2 * divisor)


def percent(amount, rate):
    """A share of an amount."""
    return rounded(amount * rate, 100)
