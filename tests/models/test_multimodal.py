"""Models with encoders of images, whose language model is trained on text."""

import pytest
import torch
import transformers

from primerl import loss, models, testing
from primerl.testing.families import tiny_config, tiny_family


@pytest.fixture(params=["qwen3_5", "gemma3", "qwen3_vl"])
def folder(request, tmp_path):
    """A saved tiny model with an encoder; the first two families also have models without."""
    if request.param not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {request.param}")
    config = transformers.CONFIG_MAPPING[request.param]()
    of_encoder = {"depth": 1, "num_hidden_layers": 1, "hidden_size": 16, "num_heads": 2}
    of_encoder |= {"intermediate_size": 16, "num_attention_heads": 2, "out_hidden_size": 64}
    known = config.vision_config.to_dict()
    if request.param == "gemma3":
        del of_encoder["depth"]
    text = request.param if request.param == "qwen3_vl" else f"{request.param}_text"
    small = tiny_config(text)
    small = small.text_config if request.param == "qwen3_vl" else small
    whole = type(config)(
        text_config=small.to_dict(),
        vision_config={**known, **{k: v for k, v in of_encoder.items() if k in known}},
    )
    model = transformers.AutoModelForImageTextToText.from_config(whole)
    tokenizer = testing.chat_tokenizer()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_encoders_are_loaded_frozen_and_saved_under_their_names(folder, tmp_path):
    loaded, tokenizer = models.load_pretrained(folder)
    architecture = transformers.AutoConfig.from_pretrained(folder).architectures
    assert [type(loaded).__name__] == architecture

    trained = {name for name, one in loaded.named_parameters() if one.requires_grad}
    frozen = {name for name, _ in loaded.named_parameters()} - trained
    assert all(name.startswith(("model.language_model.", "lm_head.")) for name in trained)
    assert frozen
    assert not any(name.startswith(("model.language_model.", "lm_head.")) for name in frozen)

    models.save_pretrained(loaded, tmp_path / "saved", tokenizer=tokenizer)
    again, _ = models.load_pretrained(tmp_path / "saved")
    before, after = loaded.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)

    if "Gemma3" in architecture[0]:
        return  # its embedding's scale can't be computed without its values (models.load_shards)
    empty = models.empty_model(folder)
    assert {name for name, one in empty.named_parameters() if one.requires_grad} == trained
    models.load_shards(empty, folder)
    assert all(torch.equal(before[name], one) for name, one in empty.state_dict().items())


def test_packed_documents_have_the_logprobs_of_each_alone(folder):
    model, _ = models.load_pretrained(folder)
    documents = [torch.randint(2, 90, (length,)) for length in (9, 5, 17)]
    alone = []
    for one in documents:
        with torch.no_grad():
            logprobs = model(input_ids=one[None], use_cache=False).logits[0].log_softmax(-1)
        alone.append(logprobs.gather(1, one.roll(-1)[:, None])[:, 0])

    packed = loss.model_logprobs(
        model,
        torch.cat(documents),
        torch.cat([torch.arange(len(one)) for one in documents]),
        torch.cat([one.roll(-1) for one in documents]),
    )
    packed.sum().backward()

    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (not parameter.requires_grad), name


def test_a_language_model_alone_has_nothing_frozen():
    assert all(one.requires_grad for one in tiny_family("qwen3_5").parameters())
    assert all(one.requires_grad for one in tiny_family("gemma3").parameters())
    some = [one.requires_grad for one in tiny_family("qwen3_vl").parameters()]
    assert True in some
    assert False in some
