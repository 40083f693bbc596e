"""The examples of the README and the documentation, run as they stand."""

import re
from pathlib import Path

import pytest
import torch
from sandboxed import reason_against

ROOT = Path(__file__).parents[2]


def examples(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


def test_the_two_token_loss(root, capsys):
    exec(examples(root / "README.md")[0], {})

    per_token, gradient = capsys.readouterr().out.splitlines()
    assert per_token.startswith("tensor([-1.2214,  1.0000]")
    assert gradient == "tensor([-0.6107,  0.5000])"


@pytest.mark.thorough
def test_the_whole_training_run(root, smollm2_folder, tmp_path, monkeypatch, capsys):
    """SmolLM2-135M, the example's own prompts and reward; two real steps."""
    (tmp_path / "smollm2").symlink_to(smollm2_folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # which the example would set for good
    example = examples(root / "README.md")[1]
    names: dict = {}
    torch.manual_seed(0)

    exec(example, names)

    names["view"].close()
    printed = capsys.readouterr().out
    assert printed.index("loading the model") < printed.index("step 1/2  reward -")
    assert "step 2/2  reward -" in printed
    stats = names["rollouts"].stats()
    assert stats["trained"] == 4
    assert names["engine"].version == 2


def test_the_run_on_the_first_page_is_that_of_the_readme(root):
    assert examples(root / "docs/index.md") == examples(root / "README.md")[1:2]


# The first page's example needs a model: see test_the_whole_training_run.
PAGES = sorted({page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"})


@pytest.mark.parametrize("page", PAGES)
def test_the_documentation_has_no_broken_python(page, root, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for environment in root.glob("recipes/environments/*"):
        monkeypatch.syspath_prepend(str(environment))  # docs/environments.md installs them
    if page == "sandbox.md" and (reason := reason_against()):
        pytest.skip(f"no sandboxes here: {reason}")
    names: dict = {}  # a page's examples are read one after the other
    for example in examples(root / "docs" / page):
        exec(compile(example, page, "exec"), names)
