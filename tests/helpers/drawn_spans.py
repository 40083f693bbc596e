"""Spans of queries for property tests of attention."""

from hypothesis import strategies as st

from primerl.attention import Span


@st.composite
def parts_of_documents(draw, *, most, longest, most_before):
    """Draw spans of queries end to end, some with shared tokens, and the number of key rows.

    They are at most ``most`` spans of up to ``longest`` queries, after up to ``most_before`` keys.
    """
    found, queries, keys = [], 0, 0
    for _ in range(draw(st.integers(1, most))):
        length, before = draw(st.integers(1, longest)), draw(st.integers(0, most_before))
        ranges = ((keys, keys + before + length),)
        if keys and draw(st.booleans()):
            begin = draw(st.integers(0, keys - 1))
            ranges = ((begin, draw(st.integers(begin + 1, keys))), *ranges)
        found.append(Span(queries, queries + length, ranges))
        queries, keys = queries + length, keys + before + length
    return tuple(found), keys
