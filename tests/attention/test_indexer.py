"""The choice of keys: its order, its ties, its precision, and that trainer and sampler agree."""

from types import SimpleNamespace

import pytest
import torch
from tensor_sizes import Sizes

from primerl import testing
from primerl.attention import indexer as document_indexer
from primerl.attention.indexer import choose_keys, index_inputs
from primerl.rollout.engines.transformers.sparse_keys import PagedIndexer

TOP_K, LENGTH = 6, 40


def tiny_indexer(kind="glm_moe_dsa", heads=2):
    """With two heads, neither fires for a quarter of the keys, whose scores tie at 0."""
    small = {"index_topk": TOP_K, "index_n_heads": heads, "initializer_range": 0.2}
    model = testing.tiny_model(kind, **small)
    return model.model.layers[0].self_attn.indexer, model.model.rotary_emb


def layer_inputs(indexer, rotary, length=LENGTH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(length, indexer.hidden_size, generator=generator)
    q_latent = torch.randn(length, indexer.q_lora_rank, generator=generator)
    cosines, sines = rotary(hidden[None], torch.arange(length)[None])
    return hidden, q_latent, (cosines[0], sines[0])


@torch.no_grad()
def choices(indexer, *inputs, **options):
    queries, weights, keys = index_inputs(indexer, *inputs, **options)
    return choose_keys(indexer, queries, weights, keys)


def hand_made(scores, weight=1.0):
    """An indexer with one head of width 1, for which key j scores ``scores[j]``, if positive."""
    indexer = SimpleNamespace(n_heads=1, softmax_scale=1.0, index_topk=3)
    keys = torch.tensor(scores)[:, None]
    return indexer, torch.ones(len(keys), 1, 1), torch.full((len(keys), 1), weight), keys


def test_of_equal_scores_the_first_are_chosen():
    chosen = choose_keys(*hand_made([1.0, 0.0, 2.0, 0.0, 0.0, -5.0, 3.0])).tolist()

    assert [chosen[0], sorted(chosen[1]), sorted(chosen[2])] == [[0, -1, -1], [-1, 0, 1], [0, 1, 2]]
    assert [sorted(row) for row in chosen[3:]] == [[0, 1, 2]] * 3 + [[0, 2, 6]]


def test_missing_keys_come_last():
    assert choose_keys(*hand_made([1.0, 2.0, 3.0, 4.0]))[1].tolist() == [1, 0, -1]


def test_of_infinite_scores_the_first_are_chosen():
    chosen = choose_keys(*hand_made([2.0, *[torch.inf] * 70])).tolist()

    assert sorted(chosen[1]) == [-1, 0, 1]
    assert all(sorted(row) == [1, 2, 3] for row in chosen[3:])


def test_visible_keys_with_scores_of_minus_infinity_come_before_invisible_ones():
    chosen = choose_keys(*hand_made([torch.inf, 1.0, *[torch.inf] * 70], weight=-1.0)).tolist()

    assert chosen[0] == [0, -1, -1]
    assert chosen[1] == [1, 0, -1]
    assert all(sorted(row) == [0, 1, 2] for row in chosen[2:])


@pytest.mark.parametrize("kind", ["glm_moe_dsa", "deepseek_v32"])
def test_the_choice_is_the_models_own_where_scores_differ(kind):
    indexer, rotary = tiny_indexer(kind, heads=32)
    inputs = layer_inputs(indexer, rotary)
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    hidden, q_latent, rotation = inputs
    whole = [x[None] for x in (hidden, q_latent, *rotation)]
    theirs = indexer(*whole[:2], (whole[2], whole[3]), visible[None], None)[0]

    ours = choices(indexer, *inputs)

    for row in range(LENGTH):
        seen = {key for key in theirs[row].tolist() if key <= row}
        assert set(ours[row].tolist()) - {-1} == seen


def test_ties_are_resolved_alike_however_many_rows_are_scored_at_a_time(monkeypatch):
    indexer, rotary = tiny_indexer()
    inputs = layer_inputs(indexer, rotary)
    at_once = choices(indexer, *inputs)
    monkeypatch.setattr(document_indexer, "MAX_SCORES", 7 * indexer.n_heads * LENGTH)

    in_parts = choices(indexer, *inputs)

    assert torch.equal(at_once.sort(1)[0], in_parts.sort(1)[0])


def test_the_sampler_resolves_ties_as_the_trainer_does():
    """A prompt in chunks of 11 and 9 tokens, then one token at a time."""
    indexer, rotary = tiny_indexer()
    inputs = layer_inputs(indexer, rotary)
    ours = choices(indexer, *inputs).sort(1)[0]
    stored = []

    def store(keys):
        first = sum(map(len, stored))
        stored.append(keys[0, 0])
        return [(0, first, len(keys[0, 0]), lambda: torch.cat(stored))]

    paged = PagedIndexer(indexer, lambda: SimpleNamespace(store_index_keys=store))
    hidden, q_latent, rotation = inputs
    first = 0
    for count in (11, 9, *[1] * (LENGTH - 20)):
        rows = slice(first, first + count)
        part = [x[None, rows] for x in (hidden, q_latent, *rotation)]
        with torch.no_grad():
            found = paged(*part[:2], (part[2], part[3]), None, torch.arange(LENGTH)[None, rows])[0]
        for row, chosen in enumerate(found, first):
            if row >= TOP_K:
                assert torch.equal(chosen.sort()[0], ours[row])
        first += count
    assert first == LENGTH


def test_scores_in_fp8_change_few_keys():
    indexer, rotary = tiny_indexer(heads=32)
    inputs = layer_inputs(indexer, rotary)

    exact, rounded = choices(indexer, *inputs), choices(indexer, *inputs, fp8=True)

    differing = [
        len(set(a.tolist()) - set(b.tolist())) for a, b in zip(exact, rounded, strict=True)
    ]
    assert 0 < sum(differing) < 0.1 * TOP_K * LENGTH


def test_rounding_to_fp8_by_hand():
    """With a scale of 1/4, 60 becomes 240, which e4m3 has; 17 becomes 68, between 64 and 72."""
    x = torch.tensor([[60.0, 17.0, 1.0, 0.0]])

    assert document_indexer._round_to_fp8(x).tolist() == [[60.0, 16.0, 1.0, 0.0]]
    assert document_indexer._round_to_fp8(x.bfloat16()).tolist() == [[60.0, 16.0, 1.0, 0.0]]


def test_scores_exist_for_a_few_rows_at_a_time(monkeypatch):
    indexer, rotary = tiny_indexer(heads=8)
    inputs = layer_inputs(indexer, rotary, length=256)
    monkeypatch.setattr(document_indexer, "MAX_SCORES", 4 * 8 * 256)

    with Sizes() as made:
        choices(indexer, *inputs)

    assert max(made.sizes) <= 256 * max(indexer.hidden_size, 8 * indexer.head_dim)
