"""Linear attention, state-space layers and convolutions over packed documents."""

import json

import pytest
import torch
import transformers
from forked_ranks import forked_ranks

from primerl import loss
from primerl.attention import (
    Document,
    admission,
    attend_by_document,
    lay_out,
    mixers,
    refuse_unpackable,
    require_documents,
)
from primerl.parallel.context_parallel.mixing import SharedDocumentMixer, share_mixers
from primerl.testing.families import tiny_family


def drawn_pack(lengths):
    """Documents, the same end to end, and their positions."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(2, 96, (length,), generator=generator) for length in lengths]
    return documents, torch.cat(documents), torch.cat([torch.arange(n) for n in lengths])


def logits_alone(model, documents):
    """The reference: transformers' own model, one document at a time."""
    return torch.cat([model(one[None], use_cache=False).logits[0] for one in documents])


def test_documents_of_similar_lengths_share_a_call():
    documents = (Document(0, 3), Document(3, 5, ((0, 2),)), Document(5, 105), Document(105, 209))
    rows = mixers._divide(lay_out(documents).plan, documents, torch.device("cpu"))

    short, long = rows.groups
    assert short.tolist() == [[0, 1, 2, 2], [0, 1, 3, 4]]  # padding, and shared tokens
    assert long.shape == (2, 104)
    assert long[0, 100:].tolist() == [104] * 4
    # The outputs of the second document's own rows are the last two of its row of four.
    assert rows.order[:5].tolist() == [0, 1, 2, 6, 7]
    assert rows.order[5:].tolist() == [*range(8, 108), *range(112, 216)]


@pytest.mark.parametrize(
    ("length", "rounded"), [(1, 64), (64, 64), (65, 80), (80, 80), (100, 112), (4097, 5120)]
)
def test_lengths_are_rounded_by_at_most_a_quarter(length, rounded):
    assert mixers._rounded(length) == rounded


def test_names_and_hooks_of_a_mixer_stay():
    model = tiny_family("qwen3_next")
    names, called = list(model.state_dict()), []
    kind = type(model.model.layers[0].linear_attn)
    model.model.layers[0].linear_attn.register_forward_hook(lambda *_: called.append(1))

    mixers.mix_by_document(model)
    mixers.mix_by_document(model)
    documents = lay_out((Document(0, 4), Document(4, 9)))
    ids, positions = torch.arange(9)[None], torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    model(ids, position_ids=positions, documents=documents, use_cache=False)

    assert list(model.state_dict()) == names
    assert isinstance(model.model.layers[0].linear_attn, kind)
    assert len(called) == 1
    assert len(model.model.layers[0]._forward_pre_hooks) == 1


def test_a_mixer_without_its_documents_is_refused():
    model = tiny_family("mamba2", num_heads=8)
    mixer = model.backbone.layers[0].mixer
    replaced = mixers.combined_module(mixers.DocumentMixer, mixer, handed_over=None)
    documents = lay_out((Document(0, 2), Document(2, 4)))

    with require_documents(documents), pytest.raises(ValueError, match="does not receive"):
        replaced(torch.zeros(1, 4, 64))
    assert replaced(torch.zeros(1, 4, 64)).shape == (1, 4, 64)


@pytest.mark.parametrize(
    "family", ["qwen3_next", "kimi_linear", "nemotron_h", "lfm2", "falcon_h1", "recurrent_gemma"]
)
def test_documents_in_several_calls_and_chunks_are_each_as_alone(family):
    """In three calls of each mixer; the delta rule divides documents into chunks of 64 tokens."""
    model = tiny_family(family)
    documents, token_ids, positions = drawn_pack((5, 70, 3, 130))
    labels, weights = token_ids.roll(-1), torch.linspace(1, 2, len(token_ids))
    parameters = list(model.parameters())
    expected = loss.token_logprobs(logits_alone(model, documents), labels)
    theirs = torch.autograd.grad((expected * weights).sum(), parameters, materialize_grads=True)

    logprobs = loss.model_logprobs(model, token_ids, positions, labels)
    ours = torch.autograd.grad((logprobs * weights).sum(), parameters, materialize_grads=True)

    torch.testing.assert_close(logprobs, expected, atol=2e-5, rtol=0)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).norm() <= 1e-4 * other.norm()


@pytest.fixture(scope="session")
def found_on_ranks(root, tmp_path_factory):
    """What tests/ranks/mixers.py found on each of two ranks, in one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    done = forked_ranks(root / "tests/ranks/mixers.py", folder, ranks=2, cwd=folder)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.thorough
def test_a_model_that_was_packed_before_it_was_sharded_is_as_alone_on_two_ranks(found_on_ranks):
    for one in found_on_ranks:
        assert one["logprobs"] < 2e-5
        assert len(one["gradients"]) > 20
        assert max(one["gradients"]) < 1e-4


def test_mixers_of_one_process_become_those_of_several_ranks():
    model = tiny_family("qwen3_next")
    names = list(model.state_dict())
    mixers.mix_by_document(model)

    share_mixers(model)
    share_mixers(model)
    mixers.mix_by_document(model)

    ((name, mixer),) = admission.named_mixers(model)
    layer = model.get_submodule(name.rpartition(".")[0])
    assert isinstance(mixer, SharedDocumentMixer)
    assert type(mixer).__name__ == "Qwen3NextGatedDeltaNet"
    assert len(layer._forward_pre_hooks) == len(model.model._forward_pre_hooks) == 1
    assert list(model.state_dict()) == names
    with pytest.raises(ValueError, match="does not receive the documents"):
        model(torch.arange(4)[None])


# Two calls of as many documents each, or of different numbers.
GROUPS = [(40, 100), (40, 100, 50), (1, 1, 1, 1)]
CARRYING = ["qwen3_next", "lfm2", "minimax", "recurrent_gemma", "bamba"]


@pytest.mark.parametrize("lengths", GROUPS)
@pytest.mark.parametrize("family", CARRYING)
def test_by_default_a_pack_makes_no_cache_that_carries_a_state(family, lengths):
    model = tiny_family(family).eval()
    documents, token_ids, positions = drawn_pack(lengths)
    expected = logits_alone(model, documents)

    layout = attend_by_document(model, positions)
    with require_documents(layout):
        found = model(token_ids[None], position_ids=positions[None], documents=layout)

    torch.testing.assert_close(found.logits[0], expected, atol=2e-5, rtol=1e-5)
    assert getattr(found, "past_key_values", None) is None


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "minimax_m3_vl_text"])
def test_a_cache_that_is_given_for_a_pack_is_refused(family):
    model = tiny_family(family)
    _, token_ids, positions = drawn_pack((40, 100))
    layout = attend_by_document(model, positions)
    cache = transformers.DynamicCache(config=model.config)

    with pytest.raises(ValueError, match="got a cache of keys or states"):
        model(
            token_ids[None], position_ids=positions[None], documents=layout, past_key_values=cache
        )


def test_one_document_keeps_its_cache():
    model = tiny_family("qwen3_next").eval()
    _, token_ids, positions = drawn_pack((7,))
    expected = model(token_ids[None]).logits
    layout = attend_by_document(model, positions)

    found = model(token_ids[None], position_ids=positions[None], documents=layout)

    torch.testing.assert_close(found.logits, expected)
    assert found.past_key_values.get_seq_length() == 7


@pytest.mark.parametrize("family", ["minimax_m3_vl_text", "deepseek_v4"])
def test_another_attention_that_would_choose_keys_of_the_whole_pack_is_refused(family):
    """Such as MiniMaxAI/msa, which transformers gets from the network."""
    eager = transformers.AttentionInterface()["sdpa"]
    transformers.AttentionInterface.register("chooses_over_the_pack", eager)
    model = tiny_family(family)
    model.set_attn_implementation("chooses_over_the_pack")
    _, token_ids, positions = drawn_pack((9, 12))

    for refused in (
        lambda: refuse_unpackable(model),
        lambda: attend_by_document(model, positions),
        lambda: loss.model_logprobs(model, token_ids, positions, token_ids),
    ):
        with pytest.raises(ValueError, match=r"uses chooses_over_the_pack attention.*'sdpa'"):
            refused()
    assert attend_by_document(model, torch.arange(4)).spans == (Document(0, 4),)
