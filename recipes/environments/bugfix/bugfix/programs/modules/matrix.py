"""Matrices as lists of rows.

>>> multiply([[1, 2], [3, 4]], [[5, 6], [7, 8]])
[[19, 22], [43, 50]]
>>> multiply([[1, 0, 2]], [[3], [1], [4]])
[[11]]
>>> multiply([[1, 2]], [[1, 2]])
ValueError
>>> transpose([[1, 2, 3], [4, 5, 6]])
[[1, 4], [2, 5], [3, 6]]
>>> transpose([[7]])
[[7]]
>>> identity(2)
[[1, 0], [0, 1]]
>>> identity(3)
[[1, 0, 0], [0, 1, 0], [0, 0, 1]]
>>> determinant([[1, 2], [3, 4]])
-2
>>> determinant([[2, 0, 1], [1, 3, 2], [1, 1, 1]])
0
>>> determinant([[1, 2, 3], [0, 4, 5], [1, 0, 6]])
22
>>> determinant([[5]])
5
>>> trace([[1, 9], [8, 2]])
3
>>> rotate([[1, 2], [3, 4]])
[[3, 1], [4, 2]]
>>> rotate([[1, 2, 3], [4, 5, 6]])
[[4, 1], [5, 2], [6, 3]]
>>> power([[1, 1], [1, 0]], 5)
[[8, 5], [5, 3]]
>>> power([[2, 3], [4, 5]], 0)
[[1, 0], [0, 1]]
"""


def multiply(a, b):
    """The product of two matrices."""
    if len(a[0]) != len(b):
        raise ValueError("the shapes don't fit")
    columns = transpose(b)
    return [[sum(x * y for x, y in zip(row, column)) for column in columns] for row in a]


def transpose(a):
    """Rows as columns."""
    return [[row[i] for row in a] for i in range(len(a[0]))]


def identity(n):
    """The n by n matrix that changes nothing."""
    return [[1 if i == j else 0 for j in range(n)] for i in range(n)]


def minor(a, i, j):
    """The matrix without row i and column j."""
    rows = a[:i] + a[i + 1 :]
    return [row[:j] + row[j + 1 :] for row in rows]


def determinant(a):
    """The determinant, along the first row."""
    if len(a) == 1:
        return a[0][0]
    total = 0
    for j in range(len(a)):
        factor = -1 if j % 2 else 1
        total += factor * a[0][j] * determinant(minor(a, 0, j))
    return total


def trace(a):
    """The sum of the diagonal."""
    return sum(a[i][i] for i in range(len(a)))


def rotate(a):
    """The matrix turned by 90 degrees to the right."""
    return [list(column) for column in zip(*a[::-1])]


def power(a, n):
    """The n-th power."""
    result = identity(len(a))
    for _ in range(n):
        result = multiply(result, a)
    return result
