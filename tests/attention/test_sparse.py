"""Sparse attention of packed documents, against each document run alone by transformers."""

import copy
import itertools
import json

import pytest
import torch
from forked_ranks import forked_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_sizes import Sizes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from primerl import attention, loss, models, parallel, testing
from primerl._common.forward_passes import recomputation_method
from primerl.attention import find_documents
from primerl.attention import indexer as document_indexer
from primerl.attention.division import divide_spans
from primerl.attention.documents import Span, lay_out
from primerl.attention.indexer import DocumentIndexer
from tests.helpers.pretended_gpu import GPU, PretendedGPU

TOP_K = 4
LENGTHS = [5, 1, 9, 5, 12, 3, 40]  # some longer, some shorter than that
MODELS = {
    "glm_moe_dsa": {},
    "deepseek_v32": {},
    "shared": {
        "indexer_types": ["full", "shared", "shared", "full"],
        "num_hidden_layers": 4,
    },
}


def test_the_division_of_a_pack_is_copied_to_a_gpu_without_waiting():
    spans = Span(0, 9, ((0, 9),)), Span(9, 12, ((9, 12),))
    plan = lay_out(spans).plan
    with PretendedGPU() as gpu:
        found = divide_spans(plan, spans, 4, GPU)
        assert gpu.waits == []
        assert found.long_rows.cpu().tolist() == list(range(9))


class Operators(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))

    def count(self, name):
        return self.names.count(name)


def sparse_model(kind="glm_moe_dsa", **config):
    """With enough heads that scores of exactly 0, which tie, are rare."""
    small = {"index_topk": TOP_K, "index_n_heads": 12, "index_head_dim": 16}
    small |= {"initializer_range": 0.2, **MODELS.get(kind, {}), **config}
    return testing.tiny_model("glm_moe_dsa" if kind == "shared" else kind, **small)


def packed(lengths, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(2, 64, (n,), generator=generator) for n in lengths]
    token_ids = torch.cat(documents)
    return documents, token_ids, torch.cat([torch.arange(n) for n in lengths]), token_ids.roll(-1)


def alone(model, documents, labels, attention="eager"):
    """The reference: transformers' own indexer and attention, one document at a time."""
    model.set_attn_implementation(attention)
    logits = [model(input_ids=one[None], use_cache=False).logits[0] for one in documents]
    log_p = torch.cat(logits).log_softmax(-1)
    return log_p.gather(-1, labels[:, None])[:, 0]


def gradients(model, logprobs):
    return torch.autograd.grad(logprobs.sum(), list(model.parameters()), allow_unused=True)


def assert_equal_to_alone(model, lengths):
    documents, token_ids, position_ids, labels = packed(lengths)
    ours = loss.model_logprobs(model, token_ids, position_ids, labels)
    mine = gradients(model, ours)
    theirs = alone(model, documents, labels)
    others = gradients(model, theirs)
    torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=0)
    for gradient, other in zip(mine, others, strict=True):
        assert (gradient is None) == (other is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, other, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, [4, 3, 1, 2]], ids=["longer", "all shorter"])
@pytest.mark.parametrize("kind", MODELS)
def test_packed_documents_are_each_as_alone(kind, lengths, recompute):
    model = sparse_model(kind)
    if recompute:
        model.train()
        recomputation_method(model)({"use_reentrant": False})
    assert_equal_to_alone(model, lengths)


@pytest.mark.parametrize("kind", MODELS)
def test_long_documents_are_computed_some_rows_at_a_time(kind, monkeypatch):
    model = sparse_model(kind)
    # 9 rows of the indexer's 12 heads, and 27 of attention's 4, for the 40 keys of the longest
    monkeypatch.setattr(document_indexer, "MAX_SCORES", 9 * 12 * 40)
    assert_equal_to_alone(model, LENGTHS)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 14), min_size=1, max_size=5), st.integers(1, 6), st.integers(0, 9))
def test_the_keys_chosen_are_those_that_the_models_indexer_chooses_alone(lengths, top_k, seed):
    model = sparse_model(num_hidden_layers=1, index_topk=top_k, seed=seed)
    documents, token_ids, position_ids, labels = packed(lengths, seed=seed)
    found = []

    def record(module, inputs, output):
        found.append(output[0])

    with torch.no_grad():
        model.model.layers[0].self_attn.indexer.register_forward_hook(record)
        alone(model, documents, labels)
        theirs = found.copy()
        loss.model_logprobs(model, token_ids, position_ids, labels)  # this hook is now within
        model.model.layers[0].self_attn.indexer.register_forward_hook(record)
        found.clear()
        loss.model_logprobs(model, token_ids, position_ids, labels)

    ours = found[-1]
    assert ours.shape == (len(token_ids), top_k if max(lengths) > top_k else 0)
    begin = 0
    for one, chosen in zip(documents, theirs, strict=True):
        for row in range(len(one) if len(one) > top_k else 0):
            visible = {k for k in chosen[row].tolist() if k <= row}
            assert set(ours[begin + row].tolist()) - {-1} == visible
        begin += len(one)


def test_documents_that_see_all_they_may_need_no_indexer():
    model = sparse_model()
    _, token_ids, position_ids, labels = packed([4, 4, 3])
    loss.model_logprobs(model, token_ids, position_ids, labels)
    calls = []
    indexer = model.model.layers[0].self_attn.indexer
    indexer.wq_b.register_forward_hook(lambda *_: calls.append(1))

    loss.model_logprobs(model, token_ids, position_ids, labels)
    assert not calls
    _, token_ids, position_ids, labels = packed([4, 5, 3, 6])
    loss.model_logprobs(model, token_ids, position_ids, labels)
    assert len(calls) == 1  # for all documents


def test_selective_recomputation_repeats_no_choice_and_changes_nothing():
    _, token_ids, position_ids, labels = packed(LENGTHS)
    found = []
    for selective in (None, False, True):
        model = sparse_model("shared").train()
        if selective is not None:
            parallel.recompute(model, selective=selective)
        logprobs = loss.model_logprobs(model, token_ids, position_ids, labels)
        with Operators() as backward:
            found.append((logprobs, gradients(model, logprobs)))
        # Two of the four layers choose keys, in each of five documents.
        assert backward.count("primerl::choose_keys") == (10 if selective is False else 0)

    for logprobs, all_gradients in found[1:]:
        assert torch.equal(logprobs, found[0][0])
        for ours, theirs in zip(all_gradients, found[0][1], strict=True):
            assert ours is theirs is None or torch.equal(ours, theirs)


def test_a_pass_on_fake_tensors_leaves_nothing_behind():
    """As in planning, which runs long documents without their memory."""
    model = sparse_model()
    _, token_ids, position_ids, labels = packed(LENGTHS)
    expected = loss.model_logprobs(model, token_ids, position_ids, labels)
    fake = sparse_model(first_k_dense_replace=2)  # fake experts need bfloat16
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake.to_empty(device="cpu")
    loss.model_logprobs(fake, token_ids, position_ids, labels).sum().backward()

    assert torch.equal(loss.model_logprobs(model, token_ids, position_ids, labels), expected)


def test_no_square_mask_is_built():
    model = sparse_model(max_position_embeddings=32)
    _, token_ids, position_ids, labels = packed([8] * 128)

    with Sizes() as made:
        loss.model_logprobs(model, token_ids, position_ids, labels)

    assert max(made.sizes) < len(token_ids) ** 2 / 4


@pytest.mark.parametrize("kind", MODELS)
def test_documents_may_share_what_they_begin_with(kind):
    """A prompt of 11 tokens and a reply; 9 tokens follow 13 of these, and 1 token the first 2."""
    model = sparse_model(kind)
    generator = torch.Generator().manual_seed(3)
    root, *replies = (torch.randint(2, 64, (n,), generator=generator) for n in (11, 6, 9, 1))
    shared = [11, 13, 2]
    positions = [torch.arange(n, n + len(reply)) for n, reply in zip(shared, replies, strict=True)]
    token_ids = torch.cat([root, *replies])
    labels = token_ids.roll(-1)

    ours = loss.model_logprobs(model, token_ids, torch.cat([torch.arange(11), *positions]), labels)
    mine = gradients(model, ours)
    whole = [root]
    for n, reply in zip(shared, replies, strict=True):
        whole.append(torch.cat([whole[-1][:n], reply]))
    model.set_attn_implementation("sdpa")
    rows = [
        model(input_ids=one[None], use_cache=False).logits[0][n:]
        for n, one in zip([0, *shared], whole, strict=True)
    ]
    theirs = torch.cat(rows).log_softmax(-1).gather(-1, labels[:, None])[:, 0]

    torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=0)
    for gradient, other in zip(mine, gradients(model, theirs), strict=True):
        if gradient is not None:
            torch.testing.assert_close(gradient, other, atol=5e-5, rtol=1e-4)


def test_a_batch_of_documents_of_one_length_is_each_as_alone():
    """Plain use of a model that was switched: without positions, every row is a document."""
    model = sparse_model()
    token_ids = torch.randint(2, 64, (3, 10))
    theirs = model(input_ids=token_ids, use_cache=False).logits
    loss.model_logprobs(model, token_ids[0], torch.arange(10), token_ids[0])

    ours = model(input_ids=token_ids, use_cache=False).logits

    torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=0)


@pytest.mark.parametrize("at_most", [4, 12])
def test_packed_rows_of_a_plain_batch_are_each_as_alone(at_most):
    """Where the indexer chooses, and where documents are so short that it need not."""
    model = sparse_model(index_topk=at_most)
    token_ids = torch.randint(2, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    lengths = [[12], [7, 5]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    theirs = [
        model(input_ids=one[None], use_cache=False).logits[0]
        for row, of_row in zip(token_ids, lengths, strict=True)
        for one in row.split(of_row)
    ]
    loss.model_logprobs(model, token_ids[0], torch.arange(12), token_ids[0])

    ours = model(input_ids=token_ids, position_ids=positions, use_cache=False).logits

    torch.testing.assert_close(ours.flatten(0, 1), torch.cat(theirs), atol=5e-6, rtol=0)


def test_positions_that_were_written_over_are_read_again():
    model = sparse_model()
    _, token_ids, position_ids, labels = packed([12])
    positions = position_ids[None].clone()
    loss.model_logprobs(model, token_ids, position_ids, labels)
    model(input_ids=token_ids[None], position_ids=positions, use_cache=False)
    positions[0, 6:] = torch.arange(6)
    documents = lay_out(find_documents(positions[0]))

    ours = model(
        input_ids=token_ids[None], position_ids=positions, use_cache=False, documents=documents
    ).logits[0]

    model.set_attn_implementation("eager")
    theirs = [model(input_ids=one[None]).logits[0] for one in token_ids.split(6)]
    torch.testing.assert_close(ours, torch.cat(theirs), atol=5e-6, rtol=0)


def test_the_model_keeps_its_names_and_its_own_attention(tmp_path):
    model = sparse_model("shared")
    documents, token_ids, position_ids, labels = packed(LENGTHS)
    names = list(model.state_dict())
    parameters = dict(model.named_parameters())
    sent = [name for name, _ in models.checkpoint_tensors(model)]
    before = alone(model, documents, labels, "sdpa")
    ours = loss.model_logprobs(model, token_ids, position_ids, labels)

    assert list(model.state_dict()) == names
    assert all(parameters[name] is tensor for name, tensor in model.named_parameters())
    assert [name for name, _ in models.checkpoint_tensors(model)] == sent
    twin = copy.deepcopy(model)
    torch.testing.assert_close(loss.model_logprobs(twin, token_ids, position_ids, labels), ours)
    for one in (model, twin):
        assert torch.equal(alone(one, documents, labels, "sdpa"), before)
    cached = model.generate(documents[-1][None], max_new_tokens=3, do_sample=False)
    assert cached.shape == (1, len(documents[-1]) + 3)


def test_what_is_not_computed_is_refused():
    model = sparse_model()
    _, token_ids, position_ids, labels = packed(LENGTHS)
    loss.model_logprobs(model, token_ids, position_ids, labels)
    with pytest.raises(ValueError, match="set_attn_implementation"):
        model(input_ids=token_ids[None], use_cache=True)
    with pytest.raises(ValueError, match="set_attn_implementation"):
        model(input_ids=token_ids[None], attention_mask=torch.arange(len(token_ids))[None] > 3)
    other = type(model)(model.config)  # that shares its configuration, but not its indexers
    with pytest.raises(ValueError, match="GlmMoeDsaAttention chooses keys for the whole pack"):
        other(input_ids=token_ids[None], use_cache=False)
    assert loss.model_logprobs(other, token_ids, position_ids, labels).isfinite().all()


def test_adapter_dropout_is_refused_where_latents_are_not_expanded():
    """The layer is applied to unit vectors there, not to the latents of tokens."""
    peft = pytest.importorskip("peft")
    model = sparse_model()
    config = peft.LoraConfig(r=2, target_modules=["kv_b_proj"], lora_dropout=0.5)
    model = peft.inject_adapter_in_model(config, model).train()
    _, *short = packed([TOP_K, 3])
    _, *long = packed([TOP_K + 1])

    assert loss.model_logprobs(model, *short).isfinite().all()
    with pytest.raises(ValueError, match=r"kv_b_proj\.lora_dropout\.default has dropout"):
        loss.model_logprobs(model, *long)
    assert loss.model_logprobs(model.eval(), *long).isfinite().all()


def test_a_model_that_attends_by_kernels_of_its_own_is_refused():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("of_its_own", lambda *args, **_: (args[1], None))
    AttentionMaskInterface.register("of_its_own", sdpa_mask)
    model = sparse_model()
    model.set_attn_implementation("of_its_own")
    _, token_ids, position_ids, labels = packed([3, 4])
    with pytest.raises(ValueError, match="uses of_its_own attention, where an indexer"):
        loss.model_logprobs(model, token_ids, position_ids, labels)


def test_an_indexer_with_parameters_of_its_own_is_refused():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

    with pytest.raises(ValueError, match="Odd has parameters outside its submodules"):
        DocumentIndexer(Odd())


@pytest.mark.parametrize("frozen", [False, True])
def test_weight_decay_moves_no_frozen_indexer(frozen):
    """Optimizers skip parameters without a gradient, but not those with a gradient of zeros."""
    model = sparse_model()
    names = parallel.freeze_indexer(model) if frozen else []
    indexer = [name for name, _ in model.named_parameters() if ".indexer." in name]
    before = {name: tensor.clone() for name, tensor in models.checkpoint_tensors(model)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    _, token_ids, position_ids, labels = packed(LENGTHS)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    loss.model_logprobs(model, token_ids, position_ids, labels).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

    sent = dict(models.checkpoint_tensors(model))
    assert len(indexer) == 10
    assert set(indexer) <= set(sent)
    assert names == (indexer if frozen else [])
    for name in indexer:
        assert torch.equal(sent[name], before[name]) == (frozen or "bias" in name)
    assert not torch.equal(sent["lm_head.weight"], before["lm_head.weight"])


def test_keys_may_be_scored_in_fp8():
    model = sparse_model()
    _, token_ids, position_ids, labels = packed(LENGTHS)
    exact = loss.model_logprobs(model, token_ids, position_ids, labels)

    attention.score_in_fp8(model)

    rounded = loss.model_logprobs(model, token_ids, position_ids, labels)
    assert not torch.equal(rounded, exact)
    new = sparse_model()
    attention.score_in_fp8(new)  # before it was ever called
    assert torch.equal(loss.model_logprobs(new, token_ids, position_ids, labels), rounded)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no indexer"):
        attention.score_in_fp8(testing.tiny_model("llama"))


def test_no_layer_keeps_a_choice_that_no_other_reuses():
    """In the third layer's case the last one, which hands its choice on to nobody."""
    model = sparse_model(indexer_types=["full", "full", "shared"], num_hidden_layers=3)
    handed_on = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, inputs, outputs: handed_on.append(outputs[1].shape))
    _, token_ids, position_ids, labels = packed(LENGTHS)

    loss.model_logprobs(model, token_ids, position_ids, labels)

    assert [shape[-1] for shape in handed_on] == [0, TOP_K, 0]


def test_a_model_without_an_indexer_has_none_to_freeze():
    with pytest.raises(ValueError, match="LlamaForCausalLM has no indexer to freeze"):
        parallel.freeze_indexer(testing.tiny_model("llama"))


@pytest.fixture(scope="session")
def found(root, tmp_path_factory):
    """What tests/ranks/sparse_attention.py found on each of four ranks, in one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    script = root / "tests/ranks/sparse_attention.py"
    done = forked_ranks(script, folder, ranks=4, cwd=folder)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "cp"),
    [
        ("glm_moe_dsa, fsdp", 1),
        ("glm_moe_dsa, ep 2", 1),
        ("glm_moe_dsa, ep 4", 1),
        ("glm_moe_dsa, cp 2", 2),
        ("deepseek_v32, ep 2", 1),
        ("deepseek_v32, cp 4", 4),
    ],
)
def test_four_ranks_train_as_one_process_does(found, kind, cp):
    """Losses, gradient norms, experts chosen and weights, over three steps of AdamW."""
    one = found[0][kind]
    for ours, theirs in zip(one["history"], one["single"], strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=1e-6)
        assert ours[1] == pytest.approx(theirs[1], rel=1e-5)
    chosen = []
    for first in range(0, 4, cp):  # the rows of each pack lie on cp ranks
        peers = [rank[kind]["chosen"] for rank in found[first : first + cp]]
        chosen += [[*itertools.chain(*parts)] for parts in zip(*peers, strict=True)]
    assert chosen == one["chosen_by_one"]
    assert one["names"]
    # AdamW divides by a gradient's size, and so enlarges the rounding of gradients near zero, which
    # differs between processors.
    assert one["weights"] < 5e-5 < 1e-3 < one["moved"]


@pytest.mark.thorough
def test_frozen_indexers_stay_as_they_are_on_every_mesh(found):
    """Frozen before or after sharding, with an optimizer that gets zeros as gradients."""
    trained = [one for one in found[0].values() if "stayed" in one]
    assert len(trained) == 6
    assert all(one["stayed"] and one["frozen"] == 10 for one in trained)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["glm_moe_dsa", "deepseek_v32"])
def test_documents_that_ranks_share_are_each_as_alone(found, kind):
    """Logprobs and gradients of transformers in float64, but for its norms in float32."""
    for rank in found:
        assert len(rank[f"{kind}, divided"]) == 5
        for largest, count in rank[f"{kind}, divided"].values():
            assert largest < 1e-5
            assert count > 20
