"""Accounts of a bank.

>>> bank = Bank()
>>> bank.open("ann", 100)
>>> bank.open("bob")
>>> bank.deposit("bob", 50)
50
>>> bank.transfer("ann", "bob", 30)
True
>>> bank.balance("ann")
70
>>> bank.balance("bob")
80
>>> bank.transfer("ann", "bob", 71)
False
>>> bank.balance("ann")
70
>>> bank.withdraw("bob", 80)
0
>>> bank.withdraw("bob", 1)
ValueError
>>> bank.deposit("bob", 0)
ValueError
>>> bank.total()
70

>>> bank = Bank()
>>> bank.open("cy", 200)
>>> bank.open("cy")
ValueError
>>> bank.balance("dan")
KeyError

>>> bank = Bank()
>>> bank.open("eva", 1000)
>>> bank.open("flo", 50)
>>> bank.add_interest(10, 100)
>>> bank.balance("eva")
1100.0
>>> bank.balance("flo")
50
>>> bank.history("eva")
[('open', 1000), ('interest', 100.0)]

>>> bank = Bank()
>>> bank.open("gus", 10)
>>> bank.open("hal", 5)
>>> bank.transfer("gus", "hal", 10)
True
>>> bank.history("gus")
[('open', 10), ('withdraw', 10)]
>>> bank.history("hal")
[('open', 5), ('deposit', 10)]
>>> bank.richest()
'hal'
"""


class Bank:
    """Balances and histories by name."""

    def __init__(self):
        self._balances = {}
        self._histories = {}

    def open(self, name, amount=0):
        """A new account."""
        if name in self._balances:
            raise ValueError(f"{name} has an account")
        self._balances[name] = amount
        self._histories[name] = [("open", amount)]

    def balance(self, name):
        """Return the balance of an account."""
        return self._balances[name]

    def deposit(self, name, amount):
        """Add to an account; returns its balance."""
        if amount <= 0:
            raise ValueError("the amount must be positive")
        self._balances[name] += amount
        self._histories[name].append(("deposit", amount))
        return self._balances[name]

    def withdraw(self, name, amount):
        """Take from an account; returns its balance."""
        if amount <= 0:
            raise ValueError("the amount must be positive")
        if amount > self._balances[name]:
            raise ValueError(f"{name} does not have {amount}")
        self._balances[name] -= amount
        self._histories[name].append(("withdraw", amount))
        return self._balances[name]

    def transfer(self, giver, taker, amount):
        """Move money, if there is enough; returns whether it was moved."""
        if self._balances[giver] < amount:
            return False
        self.withdraw(giver, amount)
        self.deposit(taker, amount)
        return True

    def add_interest(self, percent, least):
        """Add interest to all accounts that hold at least ``least``."""
        for name, balance in self._balances.items():
            if balance >= least:
                interest = balance * percent / 100
                self._balances[name] = balance + interest
                self._histories[name].append(("interest", interest))

    def history(self, name):
        """Return the transactions of an account."""
        return list(self._histories[name])

    def total(self):
        """Return the sum of all balances."""
        return sum(self._balances.values())

    def richest(self):
        """The name of the account that holds most."""
        return max(self._balances, key=self._balances.get)
