"""Words for an exception, also for one whose own words can't be had."""

import traceback


def words(error: BaseException) -> str:
    """``str(error)``, which a stranger's exception may fail to give."""
    try:
        return str(error)
    except Exception:
        return summary(error)


def summary(error: BaseException) -> str:
    """``Name: words``, as the last line of a traceback."""
    return traceback.format_exception_only(error)[0].strip()
