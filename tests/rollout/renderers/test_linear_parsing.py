"""Parsing of hostile replies takes time that is linear in their length."""

import contextlib

import pytest
from growth import assert_linear, repeated
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl.rollout.renderers.tool_calls import parse_arguments, parse_tool_calls

MARKS = (
    *("<tool_call>", "</tool_call>", "<tool_call></tool_call>", "<", ">", "\n", " ", "\u2003"),
    *('"', "\\", '"name"', '"name":"', '"arguments":', "{", "}", "[", "]", ":", ",", "a", "é"),
    *('{"name":"f"}', '{"name":"f","arguments":{"a":1}}', "NaN", "1e999,", "1.5,", "1,", "-", "7"),
)
MARK = st.lists(st.sampled_from(MARKS), min_size=1, max_size=4).map("".join)
AROUND = st.lists(st.sampled_from(MARKS), max_size=3).map("".join)


@settings(max_examples=60, deadline=None)
@given(before=AROUND, part=MARK, after=AROUND)
def test_replies(before, part, after):
    assert_linear(parse_tool_calls, repeated(before, part, after))


@pytest.mark.parametrize("part", ["\n", " ", "<tool_call>", '"name" ', "</tool_call>"])
def test_calls_that_are_not_closed(part):
    assert_linear(parse_tool_calls, repeated("<tool_call>", part, ""))


@settings(max_examples=30, deadline=None)
@given(before=AROUND, part=MARK, after=AROUND)
def test_arguments(before, part, after):
    def parse(text):
        with contextlib.suppress(ValueError):
            parse_arguments(text)

    assert_linear(parse, repeated('{"a": ' + before, part, after))
