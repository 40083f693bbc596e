"""Text for exceptions, including those whose ``__str__`` fails."""

import traceback


def message(error: BaseException) -> str:
    """``str(error)``; the exception's name if that fails, as in user code it may."""
    try:
        return str(error)
    except Exception:
        return summary(error)


def summary(error: BaseException) -> str:
    """``Name: message``, as the last line of a traceback."""
    return traceback.format_exception_only(error)[0].strip()
