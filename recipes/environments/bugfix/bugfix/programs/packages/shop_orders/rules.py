"""Taxes, shipping and vouchers."""

from shop_orders.money import percent

TAXES = {"de": 19, "fr": 20, "us": 0}
FREE_FROM = 5000
SHIPPING = 490


def tax(country, amount):
    """The tax on an amount."""
    return percent(amount, TAXES[country])


def shipping(amount):
    """What it costs to send goods of a value; nothing if there is nothing to send."""
    if amount == 0 or amount >= FREE_FROM:
        return 0
    return SHIPPING


def voucher(code, amount):
    """Return the discount of a voucher on an amount."""
    if code == "TEN":
        return percent(amount, 10)
    if code == "FIVER":
        return min(500, amount)
    raise ValueError(f"there is no voucher {code}")
