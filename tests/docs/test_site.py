"""The documentation site: built strictly, with all of its links and the fields of all values."""

import html.parser
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import attrs
import pytest
from site_search import first_pages, needs_node

import primerl

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]


class Page(html.parser.HTMLParser):
    """What a page links to, and the anchors that it has."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        of = dict(attributes)
        self.anchors |= {of[name] for name in ("id", "name") if of.get(name)}
        self.links += [of[name] for name in ("href", "src") if of.get(name)]


def built(folder, *, execute_notebooks):
    """Every page of the site, by its path in ``folder``."""
    pytest.importorskip("mkdocs")
    execute = str(execute_notebooks).lower()
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "EXECUTE_NOTEBOOKS": execute},
        capture_output=True,
        encoding="utf-8",
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {path: Page(path.read_text()) for path in folder.rglob("*.html")}


@pytest.fixture(scope="module")
def site_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("site")


@pytest.fixture(scope="module")
def site(site_folder):
    """With notebooks that have not run, which they do in test_notebooks.py."""
    return built(site_folder, execute_notebooks=False)


ANSWERS = {
    "KL to a reference": "recipes/",
    "batch size": "knobs/",
    "learning rate schedule": "knobs/",
    "my own vLLM server": "nodes/",
    "two nodes": "nodes/",
    "memory": "sizes/",
    "resume and extend": "checkpoints/",
    "W&B": "recipes/",
    "LoRA": "recipes/",
    "my own reward": "recipes/",
    "mismatch_kl": "knobs/",
    "quickstart": "quickstart/",
    "gradient accumulation": "knobs/",
    "out of memory": "sizes/",
    "wandb": "recipes/",
    # The same questions in other words.
    "kl penalty beta": "recipes/",
    "kl_coef": "knobs/",
    "global batch size": "knobs/",
    "gradient_accumulation_steps": "knobs/",
    "lr scheduler": "knobs/",
    "lr_scheduler_type": "knobs/",
    "cosine decay": "knobs/",
    "warmup": "knobs/",
    "weight decay": "knobs/",
    "max tokens": "knobs/",
    "temperature": "knobs/",
    "tensor parallel": "knobs/",
    "tensor parallelism": "knobs/",
    "multi gpu": "knobs/",
    "seed": "knobs/",
    "bf16": "knobs/",
    "dtype": "knobs/",
    "external vllm url": "nodes/",
    "multi node": "nodes/",
    "multinode": "nodes/",
    "OOM": "sizes/",
    "vram": "sizes/",
    "fit 8B model on one GPU": "sizes/",
    "gradient checkpointing": "memory/",
    "checkpoint resume": "checkpoints/",
    "continue a run": "checkpoints/",
    "how to resume training from a checkpoint": "checkpoints/",
    "tensorboard": "recipes/",
    "peft": "recipes/",
    "verifier reward function": "recipes/",
    "dataset": "recipes/",
    "logprob mismatch": "knobs/",
    "getting started": "quickstart/",
    "pass@k": "evaluation/",
    "nan loss": "troubleshooting/",
    # What people type after the first run.
    "sequence length": "knobs/",
    "group size": "knobs/",
    "num generations": "knobs/",
    "deepspeed": "knobs/",
    "context length": "knobs/",
    "context window": "knobs/",
    "fsdp": "knobs/",
    "mixed precision": "knobs/",
    "clip": "knobs/",
    "gradient clipping": "knobs/",
    "entropy": "knobs/",
    "learning rate warmup": "knobs/",
    "dapo": "recipes/",
    "custom dataset": "recipes/",
    "multi turn": "recipes/",
    "reward model": "recipes/",
    "system prompt": "recipes/",
    "save model": "checkpoints/",
    "export": "checkpoints/",
    "push to hub": "checkpoints/",
    "resume": "checkpoints/",
    "checkpoint every": "checkpoints/",
    "eval": "evaluation/",
    "chat template": "fine-tuning/",
    "tool calls": "agents/",
    "vllm port": "nodes/",
    "offload": "sizes/",
    "reward hacking": "troubleshooting/",
    "slow": "troubleshooting/",
    "windows": "quickstart/",
    "mac": "quickstart/",
    "license": "",  # the first page
    "cite": "",
}


@needs_node
def test_search_puts_the_page_that_answers_first(site, site_folder):
    assert site

    assert first_pages(site_folder, ANSWERS) == ANSWERS


def test_every_link_of_the_site_leads_somewhere(site):
    broken = []
    for path, page in site.items():
        if path.name == "404.html":  # its links begin at the root of a server
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            fragment = unquote(parts.fragment)
            missing = fragment and target in site and fragment not in site[target].anchors
            if missing or not target.is_file():
                broken.append(f"{path.parent.name}: {link}")

    assert not broken
    assert sum(len(page.links) for page in site.values()) > 1000


def test_the_api_pages_have_the_fields_of_every_value(site):
    anchors = {
        path.parent.name: page.anchors
        for path, page in site.items()
        if path.parent.parent.name == "api"
    }
    values = [
        (package, f"primerl.{package}.{name}.{field.name}")
        for package in primerl.__all__
        for name in getattr(getattr(primerl, package), "__all__", ())
        for value in [getattr(getattr(primerl, package), name)]
        if isinstance(value, type) and attrs.has(value)
        for field in attrs.fields(value)
        if not (field.inherited or field.name.startswith("_"))
    ]

    assert len(values) > 50
    assert not [name for package, name in values if name not in anchors[package]]


@pytest.mark.slow  # half a minute
def test_the_pages_of_the_notebooks_have_their_plots(tmp_path):
    notebooks = [path.stem for path in (ROOT / "notebooks").glob("*.ipynb")]
    pages = built(tmp_path, execute_notebooks=True)

    plots = {
        path.parent.name: len([link for link in page.links if link.startswith("data:image/")])
        for path, page in pages.items()
        if path.parent.name in notebooks
    }
    assert plots.keys() == set(notebooks)
    assert plots["02_staleness"] > 0
    assert plots["03_losses"] > 0
