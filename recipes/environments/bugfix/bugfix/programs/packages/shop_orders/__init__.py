"""Orders of a web shop; money is in cents.

>>> order = Order("de")
>>> order.add("book", 1500, 2)
>>> order.add("pen", 100, 3)
>>> order.items()
[('book', 2), ('pen', 3)]
>>> order.subtotal()
3300
>>> order.shipping()
490
>>> order.tax()
627
>>> order.total()
4417

>>> order = Order("us")
>>> order.add("lamp", 6000, 1)
>>> order.shipping()
0
>>> order.tax()
0
>>> order.total()
6000
>>> order.apply("TEN")
>>> order.total()
5400
>>> order.apply("NOPE")
ValueError

>>> order = Order("fr")
>>> order.add("cup", 999, 1)
>>> order.add("cup", 999, 2)
>>> order.items()
[('cup', 3)]
>>> order.remove("cup", 1)
>>> order.items()
[('cup', 2)]
>>> order.remove("cup", 2)
>>> order.items()
[]
>>> order.remove("cup", 1)
ValueError
>>> order.total()
0
>>> order.add("cup", 999, 0)
ValueError

>>> order = Order("de")
>>> order.add("desk", 20000, 1)
>>> order.apply("FIVER")
>>> order.subtotal()
20000
>>> order.discount()
500
>>> order.total()
23205
>>> receipt(order)
['desk x1 200.00', 'discount -5.00', 'shipping 0.00', 'tax 37.05', 'total 232.05']

>>> euros(5)
'0.05'
>>> euros(12345)
'123.45'
>>> rounded(1055, 10)
106
>>> rounded(1004, 10)
100
>>> Order("xx")
ValueError
"""

from shop_orders.money import euros, rounded
from shop_orders.orders import Order
from shop_orders.receipts import receipt

__all__ = ["Order", "euros", "receipt", "rounded"]
