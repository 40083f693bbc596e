"""Access to the data in a report's page, and to the page in a Chromium browser."""

import asyncio
import base64
import gzip
import json
import re

import browser
import pytest

needs_chromium = pytest.mark.skipif(browser.CHROMIUM is None, reason="needs a Chromium")


def embedded(path):
    """Return the data embedded in a page, by the id of its element."""
    found = re.findall(
        r'<script type="application/gzip" id="(.*?)">(.*?)</script>', path.read_text()
    )
    return {name: json.loads(gzip.decompress(base64.b64decode(text))) for name, text in found}


def in_browser(file, folder, steps, **settings):
    """Run ``steps(page)`` in a page that shows a file, and check that it has no errors."""

    async def visit():
        async with browser.opened(file, folder / "profile", **settings) as page:
            await page.until("document.body?.dataset.ready === 'true'")
            await steps(page)
            assert page.errors == []

    asyncio.run(asyncio.wait_for(visit(), 120))
