"""Packed logprobs of real model families, against each document run alone."""

import itertools

import pytest
import torch
import torch.nn.functional as F
import transformers
from tensor_sizes import Sizes

from primerl import loss, testing
from primerl._common.forward_passes import recomputation_method
from primerl.loss import linear_head, linear_head_tiles, logprobs
from primerl.testing.families import tiny_family

LENGTHS = [5, 1, 9, 5, 12]


def packed(lengths=LENGTHS, *, vocabulary=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(2, vocabulary, (n,), generator=generator) for n in lengths]
    token_ids = torch.cat(documents)
    position_ids = torch.cat([torch.arange(n) for n in lengths])
    return documents, token_ids, position_ids, token_ids.roll(-1)


def alone(model, documents, labels, temperature):
    """The reference: transformers' own attention, one document at a time."""
    model.set_attn_implementation("eager")
    logits = [model(input_ids=document.unsqueeze(0)).logits[0] for document in documents]
    scaled = torch.cat(logits) / temperature
    return scaled.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_packed_documents_do_not_see_each_other(family, temperature):
    model = testing.tiny_model(family)
    documents, token_ids, position_ids, labels = packed()

    logprobs = loss.model_logprobs(model, token_ids, position_ids, labels, temperature=temperature)
    ours = torch.autograd.grad(logprobs.sum(), list(model.parameters()), allow_unused=True)
    reference = alone(model, documents, labels, temperature)
    theirs = torch.autograd.grad(reference.sum(), list(model.parameters()), allow_unused=True)

    torch.testing.assert_close(logprobs, reference, atol=2e-6, rtol=0)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_each_row_may_have_its_own_temperature():
    model = testing.tiny_model("llama")
    _, token_ids, position_ids, labels = packed([4, 4])
    mixed = torch.tensor([0.7] * 4 + [1.0] * 4)

    both = loss.model_logprobs(model, token_ids, position_ids, labels, temperature=mixed)

    cold = loss.model_logprobs(model, token_ids, position_ids, labels, temperature=0.7)
    warm = loss.model_logprobs(model, token_ids, position_ids, labels)
    torch.testing.assert_close(both, torch.cat([cold[:4], warm[4:]]))


def test_no_square_mask_is_built():
    """Attention sees a document at a time, so no score matrix spans the pack."""
    model = testing.tiny_model("llama", max_position_embeddings=32)
    _, token_ids, position_ids, labels = packed([8] * 64)

    with Sizes() as made:
        loss.model_logprobs(model, token_ids, position_ids, labels)

    assert max(made.sizes) < len(token_ids) ** 2 / 4


def with_logits(model, documents, labels, temperature, rows):
    """The reference: transformers' own attention and logits, one document at a time."""
    model.set_attn_implementation("eager")
    logits = [model(input_ids=document.unsqueeze(0)).logits[0] for document in documents]
    log_p = (torch.cat(logits) / temperature.unsqueeze(-1)).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    of_labels = log_p.gather(-1, labels.clamp(0, 63).unsqueeze(-1)).squeeze(-1)
    return of_labels.where(rows, 0.0), entropy.where(rows, 0.0)


def compare_with_logits(model):
    """Logprobs, entropies and the gradients of both, each row at its own temperature."""
    documents, token_ids, position_ids, labels = packed()
    generator = torch.Generator().manual_seed(1)
    rows = torch.rand(len(labels), generator=generator) < 0.6
    temperature = 0.5 + torch.rand(len(labels), generator=generator)
    advantages = torch.randn(len(labels), generator=generator)
    labels[~rows] = -100
    pack = token_ids, position_ids, labels
    parameters = list(model.parameters())

    def gradient(logprobs, entropy):
        total = (advantages * logprobs).sum() + 0.5 * (advantages.flip(0) * entropy).sum()
        return torch.autograd.grad(total, parameters, allow_unused=True)

    options = {"temperature": temperature, "rows": rows}
    only = loss.model_logprobs(model, *pack, **options)
    ours = loss.model_logprobs_and_entropy(model, *pack, **options)
    of_ours = gradient(*ours)
    theirs = with_logits(model, documents, labels, temperature, rows)

    torch.testing.assert_close(only, theirs[0], atol=3e-6, rtol=0)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=3e-6, rtol=0)
    for mine, other in zip(of_ours, gradient(*theirs), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


@pytest.fixture
def heads_seen(monkeypatch):
    """The hidden states that head_logprobs was given in place of the models' heads."""
    seen = []

    def recorded(hidden, *arguments, **options):
        seen.append(hidden)
        return linear_head.head_logprobs(hidden, *arguments, **options)

    monkeypatch.setattr(logprobs, "head_logprobs", recorded)
    return seen


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_without_the_logits_as_with_them(heads_seen, family, tied):
    compare_with_logits(testing.tiny_model(family, tie_word_embeddings=tied))

    assert len(heads_seen) == 2  # in each of the two calls
    assert all(hidden.shape == (sum(LENGTHS), 32) for hidden in heads_seen)


OTHER_HEADS = {
    "granite": {"logits_scaling": 4.0},
    "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": None},
    "cohere": {"logit_scale": 0.5},
}


@pytest.mark.parametrize("family", OTHER_HEADS)
def test_models_that_scale_or_cap_their_logits_keep_them(heads_seen, family):
    compare_with_logits(testing.tiny_model(family, **OTHER_HEADS[family]))

    assert len(heads_seen) == 1  # the first call finds out, and the second knows


def test_without_rows_all_are_scored_from_logits_too():
    model = testing.tiny_model("granite", logits_scaling=4.0)
    _, token_ids, position_ids, _ = packed([6])
    labels = torch.tensor([0, 1, 2, 0, 63, 5])

    temperature = torch.tensor(0.7)
    logprobs = loss.model_logprobs(model, token_ids, position_ids, labels, temperature=temperature)

    logits = model(input_ids=token_ids.unsqueeze(0)).logits[0]
    torch.testing.assert_close(logprobs, (logits / 0.7).log_softmax(-1)[range(6), labels])


def test_a_head_with_a_bias_keeps_its_logits(heads_seen):
    compare_with_logits(testing.tiny_model("phi"))

    assert heads_seen == []


class WithHead(torch.nn.Module):
    """A model that uses its head in an unusual way."""

    def __init__(self, treat):
        super().__init__()
        self.inner = testing.tiny_model("llama")
        self.treat = treat

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, **inputs):
        output = self.inner(**inputs)
        output.logits = self.treat(output.logits, self.inner.lm_head.weight)
        return output


def written_in_place(logits, weight):
    return logits.mul_(0.5)


def used_further(logits, weight):
    return logits + logits.mean()


def used_twice(logits, weight):
    F.linear(weight[: logits.shape[1]].unsqueeze(0), weight)
    return logits


def multiplied_elsewhere(logits, weight):
    """The head's weight multiplies something that is no row of tokens."""
    return logits * F.linear(weight[:3], weight).mean()


@pytest.mark.parametrize(
    "treat", [written_in_place, used_further, used_twice, multiplied_elsewhere]
)
def test_whatever_else_is_done_with_a_head_its_logits_are_right(treat):
    compare_with_logits(WithHead(treat))


def test_a_head_used_before_the_end_keeps_its_logits():
    model = testing.tiny_model("llama", tie_word_embeddings=True)

    def mixed(norm, arguments, hidden):
        return hidden + 0.1 * F.linear(hidden, model.lm_head.weight).mean(-1, keepdim=True)

    model.model.norm.register_forward_hook(mixed)
    compare_with_logits(model)


def test_tokens_that_a_model_rules_out_add_nothing_to_its_entropy():
    model = WithHead(lambda logits, weight: logits.index_fill(-1, torch.tensor([7]), -torch.inf))
    _, token_ids, position_ids, _ = packed([6])
    labels = torch.arange(6)

    logprobs, entropy = loss.model_logprobs_and_entropy(model, token_ids, position_ids, labels)
    gradients = torch.autograd.grad(entropy.sum(), list(model.parameters()))

    others = torch.arange(64) != 7
    log_p = model.inner(input_ids=token_ids.unsqueeze(0)).logits[0][:, others].log_softmax(-1)
    torch.testing.assert_close(logprobs, log_p[range(6), labels])
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1))
    assert all(x.isfinite().all() for x in gradients)


class WithAdapter(torch.nn.Module):
    """A head and a low-rank addition, as adapters wrap a linear layer."""

    def __init__(self, head):
        super().__init__()
        self.head = head
        self.down = torch.nn.Linear(32, 2, bias=False)
        self.up = torch.nn.Linear(2, 64, bias=False)

    @property
    def weight(self):
        return self.head.weight

    def forward(self, x):
        return self.head(x) + self.up(self.down(x))


def test_a_head_with_an_adapter_keeps_its_logits(heads_seen):
    model = testing.tiny_model("llama")
    model.set_output_embeddings(WithAdapter(model.lm_head))

    compare_with_logits(model)

    assert heads_seen == []


def test_logits_are_never_materialized():
    """Neither forward nor backward, with a vocabulary much larger than everything else."""
    model = testing.tiny_model("llama", vocab_size=50_000, max_position_embeddings=32)
    _, token_ids, position_ids, labels = packed([8] * 64)

    with Sizes() as made:
        outputs = loss.model_logprobs_and_entropy(model, token_ids, position_ids, labels)
        sum(outputs).sum().backward()

    assert max(made.sizes) <= linear_head_tiles.CPU_TILE < len(token_ids) * 50_000 / 8


def test_nothing_selected_still_has_a_graph():
    model = testing.tiny_model("llama")
    _, token_ids, position_ids, labels = packed()

    logprobs = loss.model_logprobs(
        model, token_ids, position_ids, labels, rows=torch.zeros(len(labels), dtype=torch.bool)
    )
    logprobs.sum().backward()

    assert not logprobs.any()
    assert all(x.grad is not None and not x.grad.any() for x in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"labels has shape \(3,\), but token_ids"),
        ({"labels": torch.full((4,), 64)}, r"labels\[0\] is 64, outside the vocabulary of 64"),
        ({"rows": torch.ones(5, dtype=torch.bool)}, r"rows has shape \(5,\), but token_ids .*4,"),
        (
            {"temperature": torch.ones(5)},
            r"temperature has shape \(5,\), but labels has",
        ),
        ({"temperature": -1.0}, "temperature is -1.0"),
    ],
)
def test_what_does_not_fit_the_pack_is_refused_before_the_model_runs(arguments, message):
    model = testing.tiny_model("llama")
    _, token_ids, position_ids, labels = packed([4])
    model.model.layers = None  # it could not run

    with pytest.raises(ValueError, match=message):
        loss.model_logprobs(model, token_ids, position_ids, **{"labels": labels, **arguments})


def test_checkpointing_recomputes_the_same_gradients():
    model = testing.tiny_model("qwen3_moe")
    _, token_ids, position_ids, labels = packed()

    def gradients():
        model.zero_grad()
        outputs = loss.model_logprobs_and_entropy(model, token_ids, position_ids, labels)
        sum(outputs).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    model.train()
    recomputation_method(model)({"use_reentrant": False})

    for mine, other in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_pack_must_begin_with_a_document():
    model = testing.tiny_model("llama")

    with pytest.raises(ValueError, match="begin with 0"):
        loss.model_logprobs(model, torch.tensor([5, 6]), torch.tensor([1, 2]), torch.tensor([6, 0]))
    with pytest.raises(ValueError, match="begin with 0"):  # the end of one, then another
        loss.model_logprobs(model, torch.tensor([5, 6]), torch.tensor([3, 0]), torch.tensor([6, 0]))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gpt_oss", {"num_local_experts": 4, "sliding_window": 2}),
        ("gemma2", {"sliding_window": 2}),
        ("mistral", {"sliding_window": 2}),
    ],
)
def test_windows_sinks_and_capped_scores_are_those_of_each_document_alone(family, settings):
    model = testing.tiny_model(family, **settings)
    documents, token_ids, position_ids, labels = packed([3, 7, 6])
    expected = alone(model, documents, labels, 1.0)

    ours = loss.model_logprobs(model, token_ids, position_ids, labels)

    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("granitemoehybrid", "full_attention"),  # Granite 4.0 Micro
        ("qwen3_next", "full_attention"),
        ("minimax_m3_vl_text", "full_attention"),
        ("deepseek_v4", "sliding_attention"),
    ],
)
def test_families_may_have_only_layers_of_plain_attention(family, kind):
    model = tiny_family(family, layer_types=[kind] * 2, num_hidden_layers=2)
    documents, token_ids, position_ids, labels = packed([1, 12, 6])
    expected = alone(model, documents, labels, 1.0)

    ours = loss.model_logprobs(model, token_ids, position_ids, labels)

    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_layers_that_carry_state_begin_anew_at_each_document():
    model = testing.tiny_model(
        "qwen3_next",
        layer_types=["linear_attention", "full_attention"],
        shared_expert_intermediate_size=16,
    )
    documents, token_ids, position_ids, labels = packed([3, 6])
    expected = alone(model, documents, labels, 1.0)

    ours = loss.model_logprobs(model, token_ids, position_ids, labels)

    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_a_switched_model_says_how_to_generate():
    model = testing.tiny_model("llama")
    _, token_ids, position_ids, labels = packed([4])
    expected = loss.model_logprobs(model, token_ids, position_ids, labels)

    plain = model(input_ids=token_ids.unsqueeze(0)).logits[0]

    torch.testing.assert_close(loss.token_logprobs(plain, labels), expected)
    with pytest.raises(ValueError, match="set_attn_implementation"):
        model.generate(token_ids.unsqueeze(0), max_new_tokens=2, do_sample=False)
    with pytest.raises(ValueError, match="set_attn_implementation"):
        model(input_ids=token_ids[None], attention_mask=torch.tensor([[0, 1, 1, 1]]))


CHOOSING_KEYS = ["minimax_m3_vl_text", "deepseek_v4"]
WITH_STATE = ["qwen3_next", "lfm2", "granitemoehybrid"]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", *WITH_STATE, *CHOOSING_KEYS])
def test_a_switched_model_computes_a_plain_batch_as_before(family):
    model = tiny_family(family)
    _, token_ids, position_ids, labels = packed([6, 6, 6])
    with torch.no_grad():
        expected = model(input_ids=token_ids.view(3, 6)).logits
        loss.model_logprobs(model, token_ids, position_ids, labels)  # switches its attention

        plain = model(input_ids=token_ids.view(3, 6)).logits

    torch.testing.assert_close(plain, expected, atol=1e-5, rtol=0)


PACKED_ROWS = [
    [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]],
    [[0, 0, 1, 0, 1, 2], [0, 1, 0, 1, 0, 1]],
    [[0, 1, 2, 3, 0, 1]],  # of both rows
    [[3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5]],
    None,
]


def logits_of_documents(model, token_ids, positions):
    """Logits of the rows of a batch, each document alone."""
    rows = []
    for ids, row in zip(token_ids, positions.expand_as(token_ids), strict=True):
        begins = [0, *((row.diff() != 1).nonzero().flatten() + 1).tolist(), len(row)]
        documents = ids.split([end - begin for begin, end in itertools.pairwise(begins)])
        rows.append(torch.cat([model(input_ids=one[None]).logits[0] for one in documents]))
    return torch.stack(rows)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("positions", PACKED_ROWS)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", *WITH_STATE, *CHOOSING_KEYS])
def test_a_switched_model_keeps_the_documents_of_a_plain_batch_apart(family, positions, recomputed):
    """It is called with positions alone. By default, transformers makes a cache."""
    if family in CHOOSING_KEYS and positions == PACKED_ROWS[3]:
        pytest.skip("its keys are compressed from position 0 on")
    model = tiny_family(family).train()
    _, token_ids, position_ids, labels = packed([6, 6])
    rows = token_ids.view(2, 6)
    if recomputed:
        recomputation_method(model)()
    batch = {} if positions is None else {"position_ids": torch.tensor(positions)}

    def with_gradients(logits):
        parameters = [p for p in model.parameters() if p.requires_grad]
        weight = torch.linspace(-1, 1, logits.numel()).view_as(logits)
        return logits, *torch.autograd.grad((logits * weight).sum(), parameters, allow_unused=True)

    apart = batch.get("position_ids", torch.arange(6)[None])
    expected = with_gradients(logits_of_documents(model, rows, apart))
    loss.model_logprobs(model, token_ids[:6], position_ids[:6], labels[:6])  # switches it

    found = with_gradients(model(input_ids=rows, **batch).logits)

    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=0)
    for mine, other in zip(found[1:], expected[1:], strict=True):
        assert (mine is None) == (other is None)
        if other is not None:  # some are 0 up to rounding
            assert (mine - other).norm() <= 1e-5 * other.norm() + 1e-4


def test_rows_that_begin_within_a_document_share_no_other_row():
    model = testing.tiny_model("llama")
    _, token_ids, position_ids, labels = packed([6, 6])
    loss.model_logprobs(model, token_ids, position_ids, labels)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [2, 3, 4, 0, 1, 2]])

    with pytest.raises(ValueError, match="must begin with 0"):
        model(input_ids=token_ids.view(2, 6), position_ids=positions)


@pytest.mark.parametrize("rows", [1, 2])
def test_layers_that_know_no_positions_refuse_packed_rows(rows):
    """moshi's layers pass no positions to their attention, and before 5.24 no documents either."""
    model = testing.tiny_model("moshi", audio_vocab_size=8)
    ids, packed = torch.arange(4), torch.tensor([0, 1, 0, 1])
    loss.model_logprobs(model, ids, ids, ids)
    batch = ids.expand(rows, -1)
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if version >= (5, 24):  # which passes on what ``model_logprobs`` adds to a call
        found = loss.model_logprobs(model, ids, packed, ids)
        alone = [loss.model_logprobs(model, half, packed[:2], half) for half in ids.split(2)]
        torch.testing.assert_close(found, torch.cat(alone))
    else:
        with pytest.raises(ValueError, match="does not receive the documents"):
            loss.model_logprobs(model, ids, packed, ids)
    if version < (5, 18):
        pytest.skip("its own call builds no mask here, so that nothing of ours sees positions")

    with pytest.raises(ValueError, match="does not receive the documents"):
        model(
            input_ids=batch,
            position_ids=packed.expand(rows, -1),
            use_cache=False,
        )
    assert model(input_ids=batch).logits.shape[:2] == (rows, 4)


def test_inference_mode_scores_and_leaves_training_as_it_was():
    model = testing.tiny_model("llama")
    _, token_ids, position_ids, labels = packed([7, 3])

    with torch.inference_mode():
        reference = loss.model_logprobs(model, token_ids, position_ids, labels)
    logprobs = loss.model_logprobs(model, token_ids, position_ids, labels)
    logprobs.sum().backward()

    assert not reference.requires_grad
    assert torch.equal(reference, logprobs)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_plain_use_in_inference_mode_leaves_training_as_it_was():
    model = testing.tiny_model("llama")
    _, token_ids, position_ids, labels = packed([11])
    loss.model_logprobs(model, token_ids, position_ids, labels)  # switches its attention

    with torch.inference_mode():
        model(input_ids=packed([13])[1].unsqueeze(0))
    _, token_ids, position_ids, labels = packed([13])

    loss.model_logprobs(model, token_ids, position_ids, labels).sum().backward()


def test_a_greedy_row_is_refused_only_where_it_is_selected():
    model = testing.tiny_model("llama")
    _, token_ids, position_ids, labels = packed([4])
    temperature = torch.tensor([1.0, 0.0, 1.0, 0.0])

    rows = temperature > 0
    loss.model_logprobs(model, token_ids, position_ids, labels, temperature=temperature, rows=rows)

    with pytest.raises(ValueError, match="temperature is 0.0"):
        loss.model_logprobs(model, token_ids, position_ids, labels, temperature=temperature)


def test_a_model_that_cannot_attend_by_document_is_refused():
    model = testing.tiny_model("bloom", n_head=4, n_layer=2)
    _, token_ids, position_ids, labels = packed([4, 6])

    with pytest.raises(ValueError, match="bloom has its own attention implementation"):
        loss.model_logprobs(model, token_ids, position_ids, labels)


def test_documents_with_rope_that_depends_on_the_longest_are_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = testing.tiny_model("llama", max_position_embeddings=8, rope_parameters=rope)

    short = packed([4, 8])
    loss.model_logprobs(model, *short[1:])

    with pytest.raises(ValueError, match="like its longest, which has 9 tokens, above 8"):
        loss.model_logprobs(model, *packed([4, 9])[1:])
    loss.model_logprobs(model, *packed([9])[1:])


def test_arguments_of_other_lengths_are_named():
    model = testing.tiny_model("llama")
    _, token_ids, position_ids, labels = packed([4])

    with pytest.raises(ValueError, match=r"position_ids has shape \(3,\), but token_ids .* \(4,\)"):
        loss.model_logprobs(model, token_ids, position_ids[:3], labels)
    with pytest.raises(ValueError, match=r"token_ids has shape \(1, 4\), expected \[t\]"):
        loss.model_logprobs(model, token_ids[None], position_ids[None], labels[None])


def test_by_default_the_temperature_is_one():
    model = testing.tiny_model("llama")
    _, token_ids, position_ids, labels = packed([4])

    both = loss.model_logprobs_and_entropy(model, token_ids, position_ids, labels)
    logits = model(input_ids=token_ids.unsqueeze(0)).logits[0]

    log_p = logits.log_softmax(-1)
    torch.testing.assert_close(both[0], log_p[range(4), labels])
    torch.testing.assert_close(both[1], -(log_p.exp() * log_p).sum(-1))
    alone = loss.model_logprobs(model, token_ids, position_ids, labels)
    torch.testing.assert_close(alone, both[0])
