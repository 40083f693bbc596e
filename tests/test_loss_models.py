"""Packed logprobs of real model families, against each document run alone."""

import pytest
import torch

from primerl import loss, testing

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
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(
                x.numel()
                for x in torch.utils._pytree.tree_leaves(out)
                if isinstance(x, torch.Tensor)
            )
            return out

    with Sizes():
        loss.model_logprobs(model, token_ids, position_ids, labels)

    assert max(sizes) < len(token_ids) ** 2 / 4


def test_checkpointing_recomputes_the_same_gradients():
    model = testing.tiny_model("qwen3_moe")
    _, token_ids, position_ids, labels = packed()

    def gradients():
        model.zero_grad()
        loss.model_logprobs(model, token_ids, position_ids, labels).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    for mine, other in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_pack_must_begin_with_a_document():
    model = testing.tiny_model("llama")

    with pytest.raises(ValueError, match="begin with 0"):
        loss.model_logprobs(model, torch.tensor([5, 6]), torch.tensor([1, 2]), torch.tensor([6, 0]))


def test_attention_that_is_not_computed_is_refused():
    sinks = testing.tiny_model("gpt_oss", num_local_experts=4, layer_types=["full_attention"] * 2)
    window = testing.tiny_model("mistral", sliding_window=4)
    _, token_ids, position_ids, labels = packed([3, 6])

    with pytest.raises(ValueError, match="'s_aux'"):
        loss.model_logprobs(sinks, token_ids, position_ids, labels)
    with pytest.raises(ValueError, match="document of 6 tokens exceeds the attention window of 4"):
        loss.model_logprobs(window, token_ids, position_ids, labels)


def test_layers_that_carry_state_across_documents_are_refused():
    model = testing.tiny_model(
        "qwen3_next",
        layer_types=["linear_attention", "full_attention"],
        shared_expert_intermediate_size=16,
    )
    _, token_ids, position_ids, labels = packed([3, 6])

    with pytest.raises(ValueError, match="linear_attention layers, which would carry state"):
        loss.model_logprobs(model, token_ids, position_ids, labels)


def test_a_switched_model_says_how_to_generate():
    model = testing.tiny_model("llama")
    _, token_ids, position_ids, labels = packed([4])
    expected = loss.model_logprobs(model, token_ids, position_ids, labels)

    plain = model(input_ids=token_ids.unsqueeze(0)).logits[0]

    torch.testing.assert_close(loss.token_logprobs(plain, labels), expected)
    with pytest.raises(ValueError, match="set_attn_implementation"):
        model.generate(token_ids.unsqueeze(0), max_new_tokens=2, do_sample=False)
