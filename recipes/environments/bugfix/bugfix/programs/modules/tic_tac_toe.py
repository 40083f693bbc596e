"""Tic-tac-toe on a text of nine places, row by row.

>>> winner("XXXOO    ")
'X'
>>> winner("O  O  OXX")
'O'
>>> winner("X O XO  X")
'X'
>>> winner("  O O O  ")
'O'
>>> winner("XOXXOOOXX")
>>> winner(" " * 9)
>>> moves("XOX O    ")
[3, 5, 6, 7, 8]
>>> moves("XXXOO    ")
[]
>>> play("         ", 4)
'    X    '
>>> play("    X    ", 0)
'O   X    '
>>> play("    X    ", 4)
ValueError
>>> turn("         ")
'X'
>>> turn("X        ")
'O'
>>> turn("XO       ")
'X'
>>> best_move("XX OO    ")
2
>>> best_move("XOXXO   O")
6
>>> show("XO X     ")
'X|O| \\nX| | \\n | | '
"""

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def winner(board):
    """Who has three in a line, or None."""
    for a, b, c in LINES:
        if board[a] != " " and board[a] == board[b] and board[b] == board[c]:
            return board[a]
    return None


def turn(board):
    """Whose turn it is; X begins."""
    return "X" if board.count("X") == board.count("O") else "O"


def moves(board):
    """The free places, none once somebody has won."""
    if winner(board) is not None:
        return []
    return [place for place in range(9) if board[place] == " "]


def play(board, place):
    """The board after a move."""
    if place not in moves(board):
        raise ValueError(f"{place} is not free")
    return board[:place] + turn(board) + board[place + 1 :]


def outcome(board):
    """1 if whose turn it is can win, 0 for a draw, -1 if the other one can."""
    if winner(board) is not None:
        return -1
    return max((-outcome(play(board, place)) for place in moves(board)), default=0)


def best_move(board):
    """The first of the best moves."""
    return max(moves(board), key=lambda place: -outcome(play(board, place)))


def show(board):
    """The board in three lines."""
    rows = [board[i : i + 3] for i in range(0, 9, 3)]
    return "\n".join("|".join(row) for row in rows)
