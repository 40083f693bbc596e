"""Receipts."""

from shop_orders.money import euros


def receipt(order):
    """The lines of an order's receipt."""
    lines = []
    for name, count in order.items():
        lines.append(f"{name} x{count} {euros(order.price(name) * count)}")
    if order.discount() > 0:
        lines.append(f"discount -{euros(order.discount())}")
    lines.append(f"shipping {euros(order.shipping())}")
    lines.append(f"tax {euros(order.tax())}")
    lines.append(f"total {euros(order.total())}")
    return lines
