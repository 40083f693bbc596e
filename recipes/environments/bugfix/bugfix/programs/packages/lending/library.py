"""Loans and debts."""

from lending.catalog import Catalog
from lending.fines import days_late, fine

MOST_DEBT = 100


class Library:
    """Lends at most ``most`` books to each person who owes no more than a dollar."""

    def __init__(self, most=3):
        self.catalog = Catalog()
        self._most = most
        self._loans = {}
        self._debts = {}

    def lend(self, person, key, day):
        """Lend a book; returns whether it could be lent."""
        loans = self._loans.setdefault(person, {})
        if len(loans) >= self._most or self.debt(person) > MOST_DEBT:
            return False
        if key in loans or not self.catalog.take(key):
            return False
        loans[key] = day
        return True

    def give_back(self, person, key, day):
        """Take a book back; returns the fine."""
        loans = self._loans.get(person, {})
        if key not in loans:
            raise ValueError(f"{person} does not have {key}")
        lent = loans.pop(key)
        self.catalog.put(key)
        owed = fine(days_late(lent, day))
        self._debts[person] = self.debt(person) + owed
        return owed

    def loans_of(self, person):
        """The sorted ids of a person's books."""
        return sorted(self._loans.get(person, {}))

    def debt(self, person):
        """Return the debt of a person, in cents."""
        return self._debts.get(person, 0)

    def pay(self, person, cents):
        """Pay a debt; returns what is left of it."""
        if cents > self.debt(person):
            raise ValueError("that is too much")
        self._debts[person] -= cents
        return self._debts[person]

    def overdue(self, day):
        """Who should have returned what, sorted."""
        found = []
        for person, loans in self._loans.items():
            for key, lent in loans.items():
                if days_late(lent, day) > 0:
                    found.append((person, key))
        return sorted(found)
