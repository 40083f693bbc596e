"""Where compiled layers are kept."""

import os
import stat
from pathlib import Path

import pytest
import torch

from primerl import parallel, testing
from primerl.parallel import compilation
from primerl.testing.families import tiny_family


@pytest.fixture(autouse=True)
def _cache_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(compilation.VARIABLE, "")  # so that it is restored
    monkeypatch.delenv(compilation.VARIABLE)


def test_compiled_code_is_kept_in_the_users_own_folder(tmp_path):
    folder = Path(compilation.choose_cache())

    assert os.environ[compilation.VARIABLE] == str(folder)
    assert folder.parent == tmp_path / "primerl/compiled"
    assert folder.name.startswith(f"torch-{torch.__version__}-")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_was_chosen_is_kept(monkeypatch):
    monkeypatch.setenv(compilation.VARIABLE, "/elsewhere")

    assert compilation.choose_cache() == "/elsewhere"
    assert os.environ[compilation.VARIABLE] == "/elsewhere"


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_to_is_not_used(mode):
    """Its files are pickles: who writes one could run code."""
    compilation.cache_folder().chmod(mode)

    assert compilation.choose_cache() is None
    assert compilation.VARIABLE not in os.environ


@pytest.mark.thorough
@pytest.mark.filterwarnings("default")  # torch emits warnings while its compiler is imported
def test_each_layer_is_compiled_and_the_head_is_not():
    model = testing.tiny_model("qwen3")

    parallel.compile_layers(model)

    assert compilation.VARIABLE in os.environ
    assert all(layer._compiled_call_impl is not None for layer in model.model.layers)
    assert not any(part._compiled_call_impl for part in (model, model.model, model.lm_head))


@pytest.mark.parametrize(
    "family",
    ["gpt2", "ctrl", "llama4_text", "modernbert-decoder", "Gemma3ForConditionalGeneration"],
)
def test_layers_are_found_under_any_name(family):
    model = tiny_family(family)

    layers = compilation._layers(model)

    assert len(layers) == model.config.get_text_config(decoder=True).num_hidden_layers
    assert not any("vision" in type(layer).__name__.lower() for layer in layers)


def test_a_model_without_a_list_of_layers_is_refused():
    model = tiny_family("gpt2")
    model.transformer.h = torch.nn.Sequential(*model.transformer.h)

    with pytest.raises(ValueError, match="GPT2LMHeadModel has no list of 2 layers to compile"):
        parallel.compile_layers(model)


def test_without_a_folder_torch_keeps_its_own(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    assert compilation.cache_folder() is None


def test_a_folder_with_spaces_is_not_used(monkeypatch, tmp_path):
    """torch does not quote it in the commands of its C++ compiler, which then fails."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my files"))

    assert compilation.cache_folder() is None


def test_a_relative_folder_is_not_used(monkeypatch, tmp_path):
    """Another process, such as a compiler's worker, would look for it elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    monkeypatch.setenv("HOME", str(tmp_path))

    assert compilation.cache_folder().parent == tmp_path / ".cache/primerl/compiled"


def test_another_torch_and_another_machine_have_other_folders(monkeypatch):
    names = {compilation.machine_kind()}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": False})
    names.add(compilation.machine_kind())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    names.add(compilation.machine_kind())
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    names.add(compilation.machine_kind())

    assert len(names) == 4
