"""What a report's page holds, and the page in a browser, if there is a Chromium."""

import asyncio
import base64
import gzip
import json
import re

import browser
import pytest

needs_chromium = pytest.mark.skipif(browser.CHROMIUM is None, reason="needs a Chromium")


def embedded(path):
    """The data in a page, by the id of its element."""
    found = re.findall(
        r'<script type="application/gzip" id="(.*?)">(.*?)</script>', path.read_text()
    )
    return {name: json.loads(gzip.decompress(base64.b64decode(text))) for name, text in found}


def in_browser(file, folder, steps, **settings):
    """Run ``steps(page)`` in a page that shows a file, which must not complain."""

    async def visit():
        async with browser.opened(file, folder / "profile", **settings) as page:
            await page.until("document.body?.dataset.ready === 'true'")
            await steps(page)
            assert page.errors == []

    asyncio.run(asyncio.wait_for(visit(), 120))
