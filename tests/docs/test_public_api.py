"""The public API: listed, documented, cheap to import."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys

import pytest

import primerl

PACKAGES = [f"primerl.{name}" for name in primerl.__all__]


def exports_of(package):
    return getattr(package, "__all__", [])  # a package may hold nothing but modules


def run_python(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True, timeout=120
    )
    return done.stdout.strip()


def test_the_packages_are_listed(root):
    found = {module.name for module in pkgutil.iter_modules(primerl.__path__)}
    pages = {path.stem: path.read_text() for path in (root / "docs" / "api").glob("*.md")}
    listed = re.findall(r"api/(\w+)\.md", (root / "docs" / "api.md").read_text())

    assert primerl.__all__ == sorted(name for name in found if not name.startswith("_"))
    assert listed == sorted(pages) == primerl.__all__
    for name, page in pages.items():
        assert re.findall(r"^::: (\S+)$", page, re.MULTILINE) == [f"primerl.{name}"]
    for name in primerl.__all__:
        assert inspect.ismodule(getattr(primerl, name))
    with pytest.raises(AttributeError, match="it has advantage, attention"):
        _ = primerl.losses


@pytest.mark.parametrize("name", PACKAGES)
def test_the_exports_exist_and_have_docstrings(name):
    package = importlib.import_module(name)

    assert package.__doc__
    for export in exports_of(package):
        value = getattr(package, export)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{name}.{export} has no docstring"


@pytest.mark.parametrize("name", PACKAGES)
def test_the_exports_are_listed_once_where_the_api_page_can_read_them(name):
    """The page is built without importing the package, so ``__all__`` must be a literal."""
    package = importlib.import_module(name)
    tree = ast.parse(inspect.getsource(package))
    listed = [
        name
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    ]

    assert listed == exports_of(package)
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize("name", PACKAGES)
def test_no_export_shares_the_name_of_a_submodule(name):
    package = importlib.import_module(name)
    submodules = {module.name for module in pkgutil.iter_modules(getattr(package, "__path__", []))}

    assert not submodules & set(exports_of(package))


def test_imports_load_only_what_they_need():
    code = """
import sys

def loaded(*names):
    return sorted(set(names) & set(sys.modules))

import primerl
print(loaded('torch', 'numpy', 'transformers', 'attrs', 'rich', 'asyncio'))
from primerl import advantage, filters, rollout, track, types
print(loaded('torch', 'transformers', 'rich'))
from primerl import loss, packing
print(loaded('transformers', 'rich'))
"""
    assert run_python(code).split("\n") == ["[]", "[]", "[]"]


def test_importing_primerl_takes_less_than_0_3_seconds():
    code = "import time; t = time.perf_counter(); import primerl; print(time.perf_counter() - t)"

    assert min(float(run_python(code)) for _ in range(5)) < 0.3


def test_a_missing_extra_names_the_command_that_installs_it():
    code = """
import sys
sys.modules['transformers'] = None
from primerl import testing
try:
    testing.tiny_model('llama')
except ImportError as error:
    print(error)
"""
    message = (
        "transformers is not installed; in a clone of primerl, run: pip install '.[transformers]'"
    )
    assert run_python(code) == message


def test_a_module_that_is_missing_deeper_down_is_not_blamed_on_the_extra(tmp_path):
    (tmp_path / "shallow.py").write_text("import a_module_that_is_not_there")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from primerl._common.optional import require
try:
    require('shallow', extra='x')
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert run_python(code) == "a_module_that_is_not_there"


def test_a_custom_loss_and_filter_are_tested_in_seconds_without_transformers(tmp_path, root):
    """The ten lines of docs/extending.md, run as a user would, in a folder of their own."""
    page = (root / "docs" / "extending.md").read_text()
    example = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    check = "\ndef test_light():\n    import sys\n    assert 'transformers' not in sys.modules\n"
    (tmp_path / "test_mine.py").write_text(example + check)

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )

    assert "2 passed" in done.stdout, done.stdout + done.stderr
    body = example[example.index("def test_") :]
    assert len(body.strip().splitlines()) <= 10


@pytest.mark.parametrize("module", ["primerl.testing", "primerl.track"])
def test_a_module_that_can_be_run_explains_itself(module, tmp_path):
    command = [sys.executable, "-m", module, "--help"]

    done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=tmp_path, timeout=120)

    assert done.returncode == 0, done.stderr
    assert f"python -m {module}" in done.stdout
    assert not list(tmp_path.iterdir())


def test_messages_and_pages_install_this_package_from_its_source(root):
    """Until there is a release, the name on PyPI is nobody's, or a stranger's."""
    pages = [root / "README.md", *root.glob("docs/*.md"), *(root / "recipes").rglob("*.py")]
    for path in [*pages, *(root / "primerl").rglob("*.py")]:
        assert not re.search(r"pip install '?primerl", path.read_text()), path
