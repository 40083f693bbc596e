"""The examples of the README and the documentation, run as they stand."""

import re

import pytest
import torch


def examples(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


def test_the_two_token_loss(root, capsys):
    exec(examples(root / "README.md")[0], {})

    per_token, gradient = capsys.readouterr().out.splitlines()
    assert per_token.startswith("tensor([-1.2214,  1.0000]")
    assert gradient == "tensor([-0.6107,  0.5000])"


def test_the_whole_training_run(root, smollm2_folder, tmp_path, monkeypatch, capsys):
    """SmolLM2-135M, the example's own prompts and reward; two real steps."""
    (tmp_path / "smollm2").symlink_to(smollm2_folder)
    monkeypatch.chdir(tmp_path)
    example = examples(root / "README.md")[1]
    names: dict = {}
    torch.manual_seed(0)

    exec(example, names)

    steps = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in steps] == ["0", "1"]
    stats = names["rollouts"].stats()
    assert stats["trained"] == 4
    assert names["engine"].version == 2
    assert len([line for line in example.splitlines() if line.strip()]) <= 29


def test_the_documentation_has_no_broken_python(root, monkeypatch):
    for environment in root.glob("recipes/environments/*"):
        monkeypatch.syspath_prepend(str(environment))  # docs/environments.md installs them
    for page in root.glob("docs/*.md"):
        for example in examples(page):
            exec(compile(example, str(page), "exec"), {})


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_links_to_files_lead_somewhere(root, page):
    folder = (root / page).parent
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (root / page).read_text())

    assert links
    for link in links:
        assert (folder / link).exists(), f"{page} links to {link}"
