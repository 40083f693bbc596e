"""Linear attention, state-space layers and convolutions over packed documents."""

import pytest
import torch

from primerl.attention import Document, lay_out, mixers, require_documents
from primerl.testing.families import tiny_family


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
