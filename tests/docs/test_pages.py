"""The navigation, links and commands of the README and the documentation."""

import importlib
import importlib.util
import inspect
import json
import re
from pathlib import Path

import pytest
import yaml
from page_edits import edited, part, section

import primerl
from primerl.weights.verification.scoring import Prober
from primerl.weights.verification.served_tensors import WeightReader

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted(ROOT.glob("docs/*.md")))]
API_PAGES = [f"docs/api/{name}.md" for name in primerl.__all__]
FOLDERS = "bench|docs|notebooks|primerl|recipes|tests|tools"


def test_the_index_has_the_sections_and_pages_of_the_navigation():
    settings = (ROOT / "mkdocs.yml").read_text().split("\nplugins:")[0]  # they have other tags
    navigation = yaml.safe_load(settings)["nav"]
    sections = {name: pages for section in navigation for name, pages in section.items()}
    (packages,) = [page for page in sections["Reference"] if isinstance(page, dict)]
    sections["Reference"].remove(packages)
    assert [f"docs/{page}" for page in packages["Packages"]] == API_PAGES
    index = re.split(r"^## (.*)\n", (ROOT / "docs/index.md").read_text(), flags=re.MULTILINE)
    linked = {
        name: re.findall(r"^- \[(.*?)\]\((.*?)\)", text, re.MULTILINE)
        for name, text in zip(index[1::2], index[2::2], strict=True)
        if name in sections
    }

    assert list(sections) == ["Start", "How-to", "Explanation", "Reference"]
    assert sections["Start"].pop(0) == "index.md"
    titled = {name: [(title(page), page) for page in sections[name]] for name in sections}
    assert list(linked.items()) == list(titled.items())
    pages = [f"docs/{page}" for section in sections.values() for page in section]
    notebooks = [f"docs/notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")]
    assert sorted(["docs/index.md", *pages]) == sorted([*PAGES[1:], *notebooks])


def title(page):
    path = ROOT / "docs" / page
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "".join(json.loads(text)["cells"][0]["source"])
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)  # settings of the page
    return text.splitlines()[0].removeprefix("# ")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", (ROOT / page).read_text()):
        linked = (ROOT / page).parent / target if target else ROOT / page
        assert linked.exists(), f"{page} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading).lower() for heading in headings]
            assert anchor in [slug.replace(" ", "-") for slug in slugs], f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_name_what_there_is(page):
    text = (ROOT / page).read_text()
    rules = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = " ".join(rules).split()

    for path in re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./-]*\w", text):
        assert (ROOT / path).exists(), f"{page} names {path}"
    for module in re.findall(r"python -m (primerl[\w.]*)", text):
        assert importlib.util.find_spec(module), f"{page} names {module}"
    for target in re.findall(r"(?:`|^)make ([\w-]+)", text, re.MULTILINE):
        assert target in targets, f"{page} names make {target}"


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/families.md"])
def test_names_are_exported(page):
    packages = "|".join(primerl.__all__)
    names = rf"(?<![\w./-])({packages})\.(?!md\b)([A-Za-z]\w*)"
    text = re.sub(r"`data\.(train_batch_size|max_response_length)\b", "", (ROOT / page).read_text())
    for package, name in re.findall(names, text):  # without verl's own
        exports = importlib.import_module(f"primerl.{package}").__all__
        assert name in exports, f"{page} names {package}.{name}"


@pytest.mark.parametrize(
    "method", [Prober.probe, WeightReader.read_weights], ids=["probe", "read_weights"]
)
def test_the_page_of_engines_has_the_signatures_that_a_canary_calls(method):
    _, *parameters = inspect.signature(method).parameters.values()
    named = [f"{one.name}=..." for one in parameters if one.kind is one.KEYWORD_ONLY]
    first = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
    signature = f"{method.__name__}({', '.join([*first, '*', *named])})"
    assert (ROOT / "docs/engines.md").read_text().count(signature) == 2


def test_messages_under_troubleshooting_are_those_of_the_package():
    """The longest piece of each without a number or a name is somewhere in the source."""
    source = "".join(path.read_text() for path in (ROOT / "primerl").rglob("*.py"))
    source = re.sub(r'"\s*f?"', "", source)
    rows = re.findall(
        r"^\| (`.*?`) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE
    )
    messages = [message for row in rows for message in re.findall(r"`(.*?)`", row)]

    assert len(messages) > 15
    for message in messages:
        pieces = re.split(r"\.\.\.|\b[A-Z_]+\b|\d+|lr=|[;,]", message)
        assert max(pieces, key=len).strip() in source, message


@pytest.mark.parametrize(
    "page",
    [part(ROOT, 0), part(ROOT, 1), section(ROOT, "LoRA") + section(ROOT, "Adapters alone")],
    ids=["first", "second", "adapters alone"],
)
def test_the_edits_of_the_recipe_apply(page, tmp_path):
    """The thorough tests run the edited recipes."""
    compile(edited(ROOT, tmp_path, page).read_text(), "mine.py", "exec")
