"""Orders of customers."""

from shop_orders import rules


class Order:
    """Items by name."""

    def __init__(self, country):
        if country not in rules.TAXES:
            raise ValueError(f"nothing is sent to {country}")
        self._country = country
        self._prices = {}
        self._counts = {}
        self._code = None

    def add(self, name, price, count):
        """Put more of an item into the order."""
        if count < 1:
            raise ValueError("nothing was added")
        self._prices[name] = price
        self._counts[name] = self._counts.get(name, 0) + count

    def remove(self, name, count):
        """Take some of an item out."""
        if self._counts.get(name, 0) < count:
            raise ValueError(f"there are not {count} of {name}")
        self._counts[name] -= count
        if self._counts[name] == 0:
            del self._counts[name]

    def apply(self, code):
        """Use a voucher."""
        rules.voucher(code, 0)
        self._code = code

    def items(self):
        """Names and counts, sorted."""
        return sorted(self._counts.items())

    def price(self, name):
        """The price of one."""
        return self._prices[name]

    def subtotal(self):
        """Return the cost of the items."""
        return sum(self._prices[name] * count for name, count in self._counts.items())

    def discount(self):
        """Return the discount of the voucher."""
        if self._code is None:
            return 0
        return rules.voucher(self._code, self.subtotal())

    def shipping(self):
        """Return the cost of shipping."""
        return rules.shipping(self.subtotal())

    def tax(self):
        """The tax on the reduced price."""
        return rules.tax(self._country, self.subtotal() - self.discount())

    def total(self):
        """Return the total to pay."""
        return self.subtotal() - self.discount() + self.shipping() + self.tax()
