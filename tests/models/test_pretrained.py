import json

import pytest
import torch

from primerl import loss, models, testing
from primerl.models import pretrained


def test_a_saved_model_loads_with_its_tokenizer_and_gives_the_same_logprobs(tmp_path):
    model = testing.tiny_model("qwen3_moe")
    tokenizer = testing.character_tokenizer("abc>")
    token_ids = torch.tensor(tokenizer.encode("ab>ba<eos>"))
    rows = (token_ids, torch.arange(len(token_ids)), token_ids.roll(-1))
    expected = loss.model_logprobs(model, *rows)

    models.save_pretrained(model, tmp_path / "final", tokenizer=tokenizer)
    models.save_pretrained(model, tmp_path / "final", tokenizer=tokenizer)  # in its own place
    loaded, words = models.load_pretrained(tmp_path / "final")

    torch.testing.assert_close(loss.model_logprobs(loaded, *rows), expected)
    assert words.decode(token_ids.tolist()) == "ab>ba<eos>"
    assert words.decode(token_ids.tolist(), skip_special_tokens=True) == "ab>ba"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    config = json.loads((tmp_path / "final" / "config.json").read_text())
    assert "primerl" not in json.dumps(config), "the packed attention leaked into the config"


@pytest.fixture(params=["model", "adapter"])
def save(request):
    """A function that saves a folder, that holds a model or an adapter."""
    model, tokenizer = testing.tiny_model("llama"), testing.character_tokenizer("ab")
    if request.param == "model":
        return lambda folder: models.save_pretrained(model, folder, tokenizer=tokenizer)
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    peft.inject_adapter_in_model(config, model)
    return lambda folder: models.save_adapters(model, folder)


@pytest.mark.parametrize("name", ["final", "final.partial"])
def test_a_save_does_not_replace_a_folder_that_it_did_not_write(save, tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.tex").write_text("kept")

    with pytest.raises(ValueError, match=f"{name} exists, but was not saved by primerl"):
        save(tmp_path / "final")

    assert (tmp_path / name / "thesis.tex").read_text() == "kept"


def test_a_save_does_not_replace_a_file(save, tmp_path):
    (tmp_path / "final").write_text("kept")

    with pytest.raises(ValueError, match="final exists, but was not saved"):
        save(tmp_path / "final")

    assert (tmp_path / "final").read_text() == "kept"


def test_what_was_added_to_an_earlier_save_is_kept(save, tmp_path):
    for number in range(3):
        save(tmp_path / "final")
        (tmp_path / "final" / "notes.md").write_text(f"{number}")

    assert (tmp_path / "final.earlier" / "notes.md").read_text() == "0"
    assert (tmp_path / "final.earlier-2" / "notes.md").read_text() == "1"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "final",
        "final.earlier",
        "final.earlier-2",
    ]


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/hostname", ".."])
def test_an_index_cannot_name_a_file_outside_the_models_folder(tmp_path, name):
    model = testing.tiny_model("llama")
    models.save_pretrained(model, tmp_path / "m", tokenizer=testing.character_tokenizer("ab"))
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "secret.safetensors")
    index = {"weight_map": dict.fromkeys(model.state_dict(), name)}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    empty = models.empty_model(tmp_path / "m")

    with pytest.raises(ValueError, match="leads out of the folder"):
        models.load_shards(empty, tmp_path / "m")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_a_model_of_several_files_loads_bit_for_bit(family, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "SHARD_BYTES", 20_000)
    model = testing.tiny_model(family)
    models.save_pretrained(model, tmp_path / "final", tokenizer=testing.character_tokenizer("ab"))

    loaded = models.load_pretrained(tmp_path / "final")[0].state_dict()
    ours = model.state_dict()
    assert loaded.keys() == ours.keys()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in loaded.items())
    files = sorted((tmp_path / "final").glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert len(files) > 4
    assert max(path.stat().st_size for path in files) < 30_000
    model.save_pretrained(tmp_path / "theirs")
    configs = [(tmp_path / name / "config.json").read_text() for name in ("final", "theirs")]
    assert configs[0] == configs[1]


def test_an_empty_model_has_the_generation_configuration_of_its_folder(tmp_path):
    tokenizer = testing.character_tokenizer("ab")
    models.save_pretrained(testing.tiny_model("llama"), tmp_path / "model", tokenizer=tokenizer)
    written = tmp_path / "model/generation_config.json"
    content = json.loads(written.read_text())
    written.write_text(json.dumps({**content, "eos_token_id": [2, 7]}))

    model = models.empty_model(tmp_path / "model")
    assert models.stop_token_ids(model) == (2, 7)
    models.load_shards(model, tmp_path / "model")
    models.save_pretrained(model, tmp_path / "again", tokenizer=tokenizer)
    written.unlink()

    again = json.loads((tmp_path / "again/generation_config.json").read_text())
    assert again["eos_token_id"] == [2, 7]
    models.empty_model(tmp_path / "model")  # a folder without one is no fault


def test_rank_0_needs_a_folder():
    with pytest.raises(ValueError, match="folder is None"):
        models.save_pretrained(testing.tiny_model("llama"), None, tokenizer=None)


@pytest.mark.parametrize(
    "name", ["/nowhere/model", "./model", "model", "a/b/c", "nobody/no-such-model-7c1e"]
)
def test_a_model_that_is_not_there_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=name):
        models.load_pretrained(name)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ValueError, match="has no config.json"):
        models.load_pretrained(tmp_path)
