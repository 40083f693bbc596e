"""Screenshots: of a run's report for the documentation, and of pages of the site to look at.

    make docs
    python tools/screenshots.py RUN_DIR

writes docs/images/report.png, of that run; docs/images/agents.png, of scripted agents that it plays
(tests/helpers/agent_run.py), with the tokenizer of RUN_DIR/final; and site/screenshots/ with six
pages, light and dark. Needs Chromium. A test fails when the report's page has changed since
(tests/track/test_report.py).
"""

import asyncio
import hashlib
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/helpers"))

import agent_run
import browser

from primerl import track

# That decide how a report looks.
SOURCES = ("report_page.html", "report_conversation.js", "report.py")
IMAGES = ROOT / "docs/images"
PAGES = ["", "recipes", "api", "metrics", "coming-from", "notebooks/02_staleness"]


def page_digest() -> str:
    """Of what reports are made with."""
    sources = [(ROOT / "primerl/track" / name).read_bytes() for name in SOURCES]
    return hashlib.sha256(b"".join(sources)).hexdigest()


async def shoot_report(run: str) -> None:
    """The curves of a run, and one of its groups."""
    report = track.write_report([run])
    async with browser.opened(report, tempfile.mkdtemp(), height=1900) as page:
        await page.until("document.body?.dataset.ready === 'true'")
        await page.click("#row-1")
        await page.until("document.querySelectorAll('article').length > 0")
        await page.press("End")  # the last step, whose rollouts are of earlier weights
        await page.press("g")  # the whole group, side by side
        await page.press("c")  # tokens colored
        await page.run("window.scrollTo(0, 0)")
        await page.screenshot(IMAGES / "report.png")
    (IMAGES / "report.sha256").write_text(page_digest() + "\n")


async def shoot_agents(run: Path) -> None:
    """A rollout of more than 100 turns, where its history is summarised."""
    async with browser.opened(run / "report.html", tempfile.mkdtemp(), height=1250) as page:
        await page.until("document.body?.dataset.ready === 'true'")
        titles = "[...document.querySelectorAll('#charts figure')]"
        turns = f"{titles}.find(one => one.textContent.startsWith('turns per rollout'))"
        await page.run(f"{turns}.id = 'turns'")
        await page.click("#turns path")  # the step in the middle
        await page.until("document.querySelector('.conversation') !== null")
        bars = "[...document.querySelectorAll('.lane button')]"
        await page.run(f"{bars}.find(one => one.title.includes('summary')).click()")
        await page.run("document.getElementById('filters').scrollIntoView()")
        await page.screenshot(IMAGES / "agents.png")


async def shoot_site(folder: Path) -> None:
    """Six pages of the built site, light and dark."""
    shots = folder / "screenshots"
    shots.mkdir(exist_ok=True)
    for dark in (False, True):
        for name in PAGES:
            file = folder / name / "index.html"
            async with browser.opened(file, tempfile.mkdtemp(), dark=dark) as page:
                await page.until("document.readyState === 'complete'")
                title = name.rpartition("/")[2] or "index"
                await page.screenshot(shots / f"{title}{'-dark' if dark else ''}.png")


def record_agents(tokenizer_folder: Path) -> Path:
    """A run of eleven steps, the one in the middle with the longest rollouts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    modules = (6, 9, 14, 22, 12, 95, 30, 18, 26, 11, 16)
    folder = Path(tempfile.mkdtemp()) / "agents"
    return agent_run.record(folder, tokenizer, steps=len(modules), modules=modules)


if __name__ == "__main__":
    asyncio.run(shoot_report(sys.argv[1]))
    asyncio.run(shoot_agents(record_agents(Path(sys.argv[1]) / "final")))
    if (ROOT / "site").is_dir():
        asyncio.run(shoot_site(ROOT / "site"))
