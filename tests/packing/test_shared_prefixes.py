"""Shared prefixes, packed once: only the amount of computation may change."""

import functools
import itertools
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from primerl import flops, loss, packing, testing
from primerl.attention import find_documents, span_kernels
from primerl.packing import prefixes
from primerl.types import NOT_SAMPLED, TrainingSample


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch):
    monkeypatch.setattr(prefixes, "WORTHWHILE", 1)


def sample(prompt, completion, *, later=(), advantage=1.0):
    """A sample: a prompt, sampled tokens and, after a tool's reply, those of ``later``."""
    tokens = [*prompt, *completion, *later]
    sampled = np.arange(len(tokens)) >= len(prompt)
    return TrainingSample(
        token_ids=tokens,
        loss_mask=sampled,
        behavior_logprobs=np.where(sampled, -np.array(tokens) / 64, 0.0),
        versions=np.where(sampled, 3, NOT_SAMPLED),
        advantages=np.where(sampled, advantage, 0.0),
    )


def test_a_prompt_of_two_samples_is_packed_once():
    samples = [sample([7, 8, 9], [20, 21]), sample([7, 8, 9], [30, 31, 32], advantage=2.0)]

    ((batch,),) = packing.pack(samples, max_tokens=16, ranks=1, share_prefixes=True)

    # The second sample keeps its prompt's last row, which predicts its first token.
    assert batch.token_ids.tolist() == [7, 8, 9, 20, 21, 9, 30, 31, 32]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5]
    assert batch.labels.tolist() == [8, 9, 20, 21, 0, 30, 31, 32, 0]
    assert batch.loss_mask.tolist() == [False, False, True, True, False, True, True, True, False]
    assert batch.advantages.tolist() == [0, 0, 1, 1, 0, 2, 2, 2, 0]
    assert batch.versions.tolist() == [-1, -1, 3, 3, -1, 3, 3, 3, -1]
    assert batch.cu_seqlens.tolist() == [0, 5, 9]
    assert batch.sequence_ids.tolist() == [0] * 5 + [1] * 4


def test_a_sequence_that_continues_another_shares_what_that_one_sampled():
    first = sample([7, 8], [20, 21])
    second = sample([7, 8, 20, 21, 50], [60])  # the history, a tool's reply, the next turn

    ((batch,),) = packing.pack([second, first], max_tokens=16, ranks=1, share_prefixes=True)

    assert batch.token_ids.tolist() == [7, 8, 20, 21, 50, 60]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.cu_seqlens.tolist() == [0, 4, 6]


def test_a_token_is_trained_in_each_sample_that_trains_it():
    same = [sample([7, 8], [20, 21]), sample([7, 8], [20, 21], advantage=-1.0)]

    ((batch,),) = packing.pack(same, max_tokens=16, ranks=1, share_prefixes=True)

    assert batch.labels[batch.loss_mask].tolist() == [20, 21, 20, 21]
    assert batch.advantages[batch.loss_mask].tolist() == [1, 1, -1, -1]


@pytest.mark.parametrize("weight", [0.5, -0.5])
def test_a_token_with_a_weight_is_in_the_loss_of_each_sample_that_has_it(weight):
    weights = np.array([0, 0, weight, 0, 0, np.nan])
    pair = [attrs.evolve(sample([7, 8, 9, 10], [20, last]), weights=weights) for last in (21, 22)]

    ((batch,),) = packing.pack(pair, max_tokens=16, ranks=1, share_prefixes=True)

    assert batch.weights.nansum() == 2 * weight


def test_few_tokens_are_not_worth_sharing(monkeypatch):
    monkeypatch.setattr(prefixes, "WORTHWHILE", 3)
    pairs = [sample([7, 8, 9], [20]), sample([7, 8, 9], [30])]

    ((batch,),) = packing.pack(pairs, max_tokens=16, ranks=1, share_prefixes=True)

    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_sample_does_not_share_tokens_that_differ_from_its_neighbours():
    """Two share the first sample's tokens, and one is as long as what the other shares."""
    root = sample([7, 8], [20, 21, 22])
    short, long = sample([7, 8], [30, 31]), sample([7, 8, 20, 21, 50], [60])

    samples = [root, short, long]
    ((batch,),) = packing.pack(samples, max_tokens=64, ranks=1, share_prefixes=True)

    assert batch.token_ids.tolist() == [7, 8, 20, 21, 22, 50, 60, 8, 30, 31]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 4, 5, 1, 2, 3]
    model = testing.tiny_model("llama")
    ours, *_ = scored(model, samples, share_prefixes=True)
    expected, *_ = scored(model, samples)
    for document, pair in expected.items():
        torch.testing.assert_close(ours[document], pair, atol=2e-6, rtol=0)


def documents_of(batch):
    """``(tokens, trained labels)`` of each document, with the tokens it shares."""
    result, rows = [], {}
    for document in find_documents(batch.position_ids):
        path = [row for begin, end in document.keys for row in range(begin, end)]
        rows |= {row: path[: place + 1] for place, row in enumerate(path) if row >= document.begin}
    for begin, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        mask = batch.loss_mask[begin:end]
        labels = batch.labels[begin:end][mask]
        result.append((tuple(batch.token_ids[rows[end - 1]].tolist()), tuple(labels.tolist())))
    return result


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)
sample_lists = st.lists(st.tuples(tokens, tokens), max_size=16)


@given(sample_lists, st.integers(12, 40), st.integers(1, 4))
@example([([1, 2], [0, 1, 2]), ([1, 2], [2, 2]), ([1, 2, 0, 1, 1], [0])], 40, 1)
@settings(max_examples=200, deadline=None)
def test_every_sample_is_there_once_with_all_its_tokens(drawn, max_tokens, ranks):
    samples = [sample(prompt, completion) for prompt, completion in drawn]

    plan = packing.pack(samples, max_tokens=max_tokens, ranks=ranks, share_prefixes=True)

    assert len({len(steps) for steps in plan}) == 1
    batches = [batch for steps in plan for batch in steps]
    assert all(len(batch.token_ids) <= max_tokens for batch in batches)
    found = [one for batch in batches for one in documents_of(batch) if one[1]]
    assert sorted(found) == sorted((tuple(p + c), tuple(c)) for p, c in drawn)


@pytest.mark.thorough
@given(sample_lists, st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_sharing_costs_no_more_than_not_sharing(drawn, ranks):
    config = SimpleNamespace(**testing.tiny_model("llama").config.to_dict())
    cost = functools.partial(flops.training, config)
    samples = [sample(prompt, completion) for prompt, completion in drawn]

    def total(**how):
        plan = packing.pack(samples, max_tokens=24, ranks=ranks, cost=cost, **how)
        return sum(
            max(sum(map(of_document, *starts_and_ends(batch))) for batch in step)
            for step in zip(*plan, strict=True)
        )

    def of_document(start, end):
        return cost(end) - (cost(start) if start else 0)

    def starts_and_ends(batch):
        starts = batch.position_ids[batch.cu_seqlens[:-1].long()]
        real = batch.cu_seqlens.diff() > 1  # a rank without samples has one masked token
        return starts[real].tolist(), (starts + batch.cu_seqlens.diff())[real].tolist()

    assert total(share_prefixes=True) <= total() * (1 + 1e-9)


def test_a_group_is_split_rather_than_leave_ranks_waiting():
    prompt = list(range(100, 110))
    samples = [sample(prompt, [20 + n, 3, 4]) for n in range(4)]

    plan = packing.pack(samples, max_tokens=64, ranks=4, share_prefixes=True)

    assert [len(batch.token_ids) for steps in plan for batch in steps] == [13] * 4
    ((alone,),) = packing.pack(samples, max_tokens=64, ranks=1, share_prefixes=True)
    assert len(alone.token_ids) == 13 + 3 * 4


def test_a_sample_that_does_not_fit_starts_a_new_family():
    samples = [sample([1, 2, 3, 4], [10 + n]) for n in range(4)]

    plan = packing.pack(samples, max_tokens=7, ranks=1, share_prefixes=True)

    assert [batch.position_ids.tolist() for batch in plan[0]] == [[0, 1, 2, 3, 4, 3, 4]] * 2


def test_lengths_are_refused_as_without_sharing():
    samples = [sample([1, 2, 3, 4], [10])]

    with pytest.raises(ValueError, match="sample 0 has 5 tokens, more than max_tokens=4"):
        packing.pack(samples, max_tokens=4, ranks=1, share_prefixes=True)
    plan = packing.pack(samples, max_tokens=4, ranks=1, share_prefixes=True, too_long="alone")
    assert len(plan[0][0].token_ids) == 5
    assert packing.pack([], max_tokens=4, ranks=2, share_prefixes=True) == [[], []]


def test_a_chain_of_turns_has_each_token_once():
    """Each sample extends the last by a tool's reply and a turn, and trains only the turn."""
    history = list(range(100, 105))
    samples = []
    for turn in range(20):
        prompt = [*history, 200 + turn, 201 + turn]
        history = [*prompt, *range(300 + turn, 304 + turn)]
        samples.append(sample(prompt, history[len(prompt) :]))
    shuffled = [samples[index] for index in np.random.default_rng(0).permutation(20)]

    ((batch,),) = packing.pack(shuffled, max_tokens=256, ranks=1, share_prefixes=True)

    assert batch.token_ids.tolist() == history
    assert batch.position_ids.tolist() == list(range(len(history)))
    assert int(batch.loss_mask.sum()) == 20 * 4


def tree(vocabulary=64):
    """Histories that were edited: turns of two agents over branches of branches, in any order."""
    generator = np.random.default_rng(1)

    def draw(n):
        return generator.integers(2, vocabulary, n).tolist()

    trunk = draw(9)
    samples = [sample(trunk, draw(4)), sample(trunk, draw(3))]
    for _ in range(3):
        branch = trunk[:6] + draw(5)
        for _ in range(3):
            turn = draw(3)
            samples.append(sample(branch, turn))
            samples.append(sample(branch, draw(2)))
            branch = branch + turn + draw(4)
    return [samples[index] for index in generator.permutation(len(samples))]


def test_a_tree_has_each_untrained_token_once():
    samples = tree()

    ((batch,),) = packing.pack(samples, max_tokens=1024, ranks=1, share_prefixes=True)

    # A trie of all prefixes, but the row before a sample's first trained token is its own, unless
    # it continues all of the sample before it.
    nodes = {tuple(one.token_ids[:n].tolist()) for one in samples for n in range(1, 99)}
    assert len(nodes) <= len(batch.token_ids) <= len(nodes) + len(samples)


def group(vocabulary=64):
    generator = np.random.default_rng(0)

    def draw(n):
        return generator.integers(2, vocabulary, n).tolist()

    prompts = [draw(9), draw(9), draw(5)]
    return [sample(prompt, draw(n)) for prompt in prompts for n in (4, 7, 4, 1)]


def scored(model, samples, **how):
    """Each trained token's logprob and entropy by (prompt, completion), and all gradients."""
    ((batch,),) = packing.pack(samples, max_tokens=512, ranks=1, **how)
    given = batch.token_ids, batch.position_ids, batch.labels
    both = loss.model_logprobs_and_entropy(model, *given, rows=batch.loss_mask)
    weights = torch.cos(batch.labels.float()) * batch.loss_mask  # so that every row matters
    value = sum((x * weights).sum() for x in both)
    gradients = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
    bounds = zip(documents_of(batch), batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)
    values = {
        document: [x[begin:end][batch.loss_mask[begin:end]] for x in both]
        for document, begin, end in bounds
    }
    return values, gradients, len(batch.token_ids)


@pytest.mark.parametrize(("shape", "spared"), [(group, 2 * 3 * 8 + 3 * 4), (tree, 284)])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_logprobs_entropies_and_gradients_are_those_of_whole_documents(family, shape, spared):
    model = testing.tiny_model(family)
    samples = shape()

    ours, our_gradients, our_rows = scored(model, samples, share_prefixes=True)
    expected, gradients, rows = scored(model, samples)

    assert our_rows == rows - spared
    assert ours.keys() == expected.keys()
    for document, pair in expected.items():
        torch.testing.assert_close(ours[document], pair, atol=2e-6, rtol=0)
    for mine, other in zip(our_gradients, gradients, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_lengths_that_are_not_computed_in_float32_give_the_same(monkeypatch):
    monkeypatch.setattr(span_kernels, "WIDENED_LENGTH", 0)
    model = testing.tiny_model("llama").to(torch.bfloat16)

    ours, *_ = scored(model, group(), share_prefixes=True)
    expected, *_ = scored(model, group())

    for document, pair in expected.items():
        torch.testing.assert_close(ours[document], pair, atol=2e-2, rtol=0)


def test_a_continuation_of_tokens_that_are_not_there_is_refused():
    model = testing.tiny_model("llama")
    position_ids = torch.tensor([0, 1, 2, 4, 5])

    with pytest.raises(ValueError, match=r"position_ids\[3\] is 4, .*; expected 0 to 3"):
        loss.model_logprobs(model, torch.arange(5), position_ids, torch.arange(5))
    with pytest.raises(ValueError, match=r"position_ids\[3\] is -1"):
        loss.model_logprobs(model, torch.arange(5), torch.tensor([0, 1, 2, -1, 0]), torch.arange(5))


def test_the_window_counts_shared_tokens():
    model = testing.tiny_model("mistral", sliding_window=4)
    ids, labels = torch.tensor([5, 6, 7, 8, 9, 10, 11]), torch.tensor([6, 7, 8, 0, 10, 11, 0])
    alone = model(torch.tensor([[5, 6, 9, 10, 11]])).logits[0, 2:4].log_softmax(-1)

    ours = loss.model_logprobs(model, ids, torch.tensor([0, 1, 2, 3, 2, 3, 4]), labels)

    torch.testing.assert_close(ours[4:6], alone.gather(1, labels[4:6, None])[:, 0])


def test_an_attention_of_the_models_own_is_refused():
    model = testing.tiny_model("llama")
    transformers.AttentionInterface.register("of_its_own", lambda *_, **__: None)
    model.set_attn_implementation("of_its_own")
    position_ids = torch.tensor([0, 1, 2, 2, 3])

    with pytest.raises(ValueError, match="documents share tokens, which of_its_own does not"):
        loss.model_logprobs(model, torch.arange(5), position_ids, torch.arange(5))
