"""Take screenshots of run reports for the documentation, and of the site's pages for inspection.

    make docs
    python tools/screenshots.py RUN_DIR

The script writes docs/images/report.png, which shows that run, and docs/images/agents.png, which
shows a run of scripted agents (tests/helpers/agent_run.py). It also writes pages of the site, light
and dark, wide and narrow, to site/screenshots/. It needs Chromium. A test fails when the report's
page has changed since the last screenshot (tests/track/test_report.py).
"""

import asyncio
import hashlib
import itertools
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/helpers"))

import agent_run
import browser
from chat_tokenizer import chat_tokenizer

from primerl import track

# Source files that determine how a report looks.
SOURCES = ("report_page.html", "report_conversation.js", "report.py", "verdict.py")
IMAGES = ROOT / "docs/images"
PAGES = ["", "quickstart", "sizes", "knobs", "recipes", "api", "metrics", "notebooks/02_staleness"]
WIDTHS = {"": 1400, "-narrow": 500}


def page_digest() -> str:
    """Return a digest of the source files of reports."""
    sources = [(ROOT / "primerl/track" / name).read_bytes() for name in SOURCES]
    return hashlib.sha256(b"".join(sources)).hexdigest()


async def shoot_report(run: str) -> None:
    """Capture the curves of a run and one of its groups."""
    report = track.write_report([run])
    async with browser.opened(report, tempfile.mkdtemp(), height=1900) as page:
        await page.until("document.body?.dataset.ready === 'true'")
        await page.click("#row-1")
        await page.until("document.querySelectorAll('article').length > 0")
        await page.press("End")  # the last step, whose rollouts come from earlier weights
        await page.press("g")  # show the whole group side by side
        await page.press("c")  # color the tokens
        await page.run("window.scrollTo(0, 0)")
        await page.screenshot(IMAGES / "report.png")
    (IMAGES / "report.sha256").write_text(page_digest() + "\n")


async def shoot_agents(run: Path) -> None:
    """Capture a rollout of more than 100 turns, at a turn where its history is shortened."""
    async with browser.opened(run / "report.html", tempfile.mkdtemp(), height=1250) as page:
        await page.until("document.body?.dataset.ready === 'true'")
        titles = "[...document.querySelectorAll('#charts figure')]"
        turns = f"{titles}.find(one => one.textContent.startsWith('turns per rollout'))"
        await page.run(f"{turns}.id = 'turns'")
        await page.click("#turns .curve")  # the step in the middle
        await page.until("document.querySelector('.conversation') !== null")
        bars = "[...document.querySelectorAll('.lane button')]"
        await page.run("document.getElementById('filters').scrollIntoView()")
        await page.run(f"{bars}.find(one => one.title.startsWith('branch 2')).click()")
        await page.screenshot(IMAGES / "agents.png")


async def shoot_site(folder: Path) -> None:
    """Capture pages of the built site, light and dark, wide and narrow."""
    shots = folder / "screenshots"
    shots.mkdir(exist_ok=True)
    for name, dark, (suffix, width) in itertools.product(PAGES, (False, True), WIDTHS.items()):
        file = folder / name / "index.html"
        async with browser.opened(file, tempfile.mkdtemp(), dark=dark, width=width) as page:
            await page.until("document.readyState === 'complete'")
            title = name.rpartition("/")[2] or "index"
            await page.screenshot(shots / f"{title}{'-dark' if dark else ''}{suffix}.png")


def record_agents() -> Path:
    """Record a run of eleven steps; the middle step has the longest rollouts."""
    modules = (6, 9, 14, 22, 12, 95, 30, 18, 26, 11, 16)
    folder = Path(tempfile.mkdtemp()) / "agents"
    return agent_run.record(folder, chat_tokenizer(), steps=len(modules), modules=modules)


if __name__ == "__main__":
    asyncio.run(shoot_report(sys.argv[1]))
    asyncio.run(shoot_agents(record_agents()))
    if (ROOT / "site").is_dir():
        asyncio.run(shoot_site(ROOT / "site"))
