"""The stock of a shop.

>>> shop = Inventory()
>>> shop.receive("pen", 10, 2)
>>> shop.receive("pen", 10, 4)
>>> shop.quantity("pen")
20
>>> shop.price("pen")
3.0
>>> shop.sell("pen", 5)
15.0
>>> shop.quantity("pen")
15
>>> shop.sell("pen", 16)
ValueError
>>> shop.quantity("ink")
0
>>> shop.worth()
45.0

>>> shop = Inventory(reorder_at=3)
>>> shop.receive("cup", 4, 5)
>>> shop.receive("jar", 2, 1)
>>> shop.receive("mug", 3, 1)
>>> shop.to_reorder()
['jar', 'mug']
>>> shop.sell("cup", 4)
20.0
>>> shop.to_reorder()
['cup', 'jar', 'mug']
>>> shop.receive("cup", 0, 5)
ValueError

>>> invoice([("pen", 2, 1.5), ("cup", 1, 4)])
7.0
>>> invoice([("pen", 10, 2)])
18.0
>>> invoice([("pen", 9, 2)])
18
>>> invoice([])
0
>>> invoice([("cup", 20, 1), ("jar", 1, 5)])
23.0
"""


class Inventory:
    """Quantities, and the mean price that was paid."""

    def __init__(self, reorder_at=5):
        self._reorder_at = reorder_at
        self._quantities = {}
        self._costs = {}

    def receive(self, name, quantity, price):
        """Add to the stock."""
        if quantity < 1:
            raise ValueError("nothing was received")
        self._quantities[name] = self.quantity(name) + quantity
        self._costs[name] = self._costs.get(name, 0) + quantity * price

    def quantity(self, name):
        """How many there are."""
        return self._quantities.get(name, 0)

    def price(self, name):
        """The mean price of one."""
        return self._costs[name] / self._quantities[name]

    def sell(self, name, quantity):
        """Take from the stock; returns what it had cost."""
        if quantity > self.quantity(name):
            raise ValueError(f"there are only {self.quantity(name)}")
        cost = self.price(name) * quantity
        self._quantities[name] -= quantity
        self._costs[name] -= cost
        return cost

    def worth(self):
        """Return the purchase cost of the stock."""
        return sum(self._costs.values())

    def to_reorder(self):
        """Return the names of items that are running out."""
        return sorted(name for name, left in self._quantities.items() if left <= self._reorder_at)


def invoice(lines):
    """The sum of lines of name, quantity and price; 10 or more of one are 10 % cheaper."""
    total = 0
    for _, quantity, price in lines:
        cost = quantity * price
        if quantity >= 10:
            cost = cost * 9 / 10
        total += cost
    return total
