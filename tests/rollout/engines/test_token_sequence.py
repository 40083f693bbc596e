"""Token sequences against lists: extended, forked, sliced, compared and sent to other processes."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl.rollout.engines.token_sequence import TokenSequence
from primerl.types import Completion

TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=300)


def test_two_continuations_of_one_prompt_are_independent():
    prompt = TokenSequence([1, 2, 3])
    one = prompt.extended([4])
    other = prompt.extended([5, 6])
    assert (one, other, prompt) == ([1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3])
    assert (one.extended([7]), one.extended([8])) == ([1, 2, 3, 4, 7], [1, 2, 3, 4, 8])
    assert other == [1, 2, 3, 5, 6]


@given(first=TOKENS, steps=st.lists(st.tuples(st.integers(0, 5), TOKENS), max_size=12))
def test_every_sequence_stays_what_it_was(first, steps):
    """Each step extends one of the sequences so far, so that they form a tree."""
    sequences, lists = [TokenSequence(first)], [list(first)]
    for parent, more in steps:
        at = parent % len(sequences)
        sequences.append(sequences[at].extended(more))
        lists.append(lists[at] + more)
    for sequence, expected in zip(sequences, lists, strict=True):
        assert list(sequence) == expected
        assert sequence == expected
        assert (len(sequence), sequence[1:-1]) == (len(expected), expected[1:-1])


def test_a_turn_shares_the_memory_of_the_turns_before():
    prompt = TokenSequence(range(1000)).extended([1])
    longer = prompt.extended([2])
    assert np.shares_memory(np.asarray(prompt), np.asarray(longer))


def test_nobody_can_change_its_tokens():
    source = np.array([1, 2], np.int32)
    sequence = TokenSequence(source)
    source[0] = 9
    assert sequence == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(sequence)[0] = 9


def test_it_is_the_array_that_other_types_expect():
    ids = TokenSequence([1, 2])
    completion = Completion(token_ids=ids, logprobs=ids, versions=ids, finish_reason="stop")
    assert completion.token_ids.tolist() == [1, 2]
    assert completion.logprobs.dtype == np.float32
    assert np.concatenate([ids, ids]).tolist() == [1, 2, 1, 2]


def test_it_is_used_as_a_list_is():
    sequence = TokenSequence([1, 2])
    assert (sequence.__add__([3]), sequence.__radd__([0])) == ([1, 2, 3], [0, 1, 2])
    assert pickle.loads(pickle.dumps(sequence)) == [1, 2]
    assert (bool(sequence), bool(TokenSequence())) == (True, False)
    assert sequence != [1, 2, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        [2**31],
        [1.5],
        ["1"],
        [[1, 2]],
        np.array([0.5]),
        np.array([2**40]),
        np.array([[1, 2]]),
        np.array(1),
    ],
)
def test_what_is_no_token_id_is_refused(wrong):
    with pytest.raises(ValueError, match="integers of at most 32 bits"):
        TokenSequence(wrong)
