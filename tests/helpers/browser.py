"""A headless Chromium, controlled through its DevTools protocol (chromedevtools.github.io)."""

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


class Page:
    """One page of the browser; ``errors`` lists the errors of its console and scripts."""

    def __init__(self, socket):
        self.errors = []
        self._socket = socket
        self._ids = itertools.count()
        self._pending = {}

    async def call(self, method, **params):
        number = next(self._ids)
        self._pending[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        return await asyncio.wait_for(self._pending[number], 60)

    async def listen(self):
        async for message in self._socket:
            event = message.json()
            if "id" in event:
                self._pending.pop(event["id"]).set_result(event.get("result", event))
            elif event["method"] == "Runtime.exceptionThrown":
                self.errors.append(event["params"]["exceptionDetails"])
            elif event["method"] == "Log.entryAdded":
                self.errors.append(event["params"]["entry"])

    async def run(self, script):
        """Evaluate an expression in the page, and await it if it is a promise."""
        answer = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, script):
        """Wait until an expression is true."""
        async with asyncio.timeout(60):
            while not await self.run(script):
                await asyncio.sleep(0.02)

    async def press(self, key):
        for kind in ("keyDown", "keyUp"):
            text = key if len(key) == 1 and kind == "keyDown" else ""
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, text=text)

    async def click(self, selector):
        x, y = await self.run(
            "(() => {"
            f"const element = document.querySelector({selector!r});"
            "element.scrollIntoView({block: 'center'});"
            "const box = element.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2];"
            "})()"
        )
        at = {"x": x, "y": y, "button": "left", "clickCount": 1}
        await self.call("Input.dispatchMouseEvent", type="mousePressed", **at)
        await self.call("Input.dispatchMouseEvent", type="mouseReleased", **at)

    async def screenshot(self, path):
        answer = await self.call("Page.captureScreenshot")
        Path(path).write_bytes(base64.b64decode(answer["data"]))


@contextlib.asynccontextmanager
async def opened(file, folder, *, width=1400, height=1000, dark=False):
    """Open a page that shows a file; ``folder`` is for the browser's profile."""
    # The browser, which is killed, leaves sockets here; their paths must be short.
    sockets = tempfile.mkdtemp()
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += [f"--user-data-dir={folder}", f"--window-size={width},{height}"]
    command += ["--remote-debugging-port=0", "--hide-scrollbars", "about:blank"]
    process = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": sockets},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        address = Path(folder) / "DevToolsActivePort"
        async with asyncio.timeout(60):
            while not (address.exists() and len(address.read_text().split()) == 2):
                await asyncio.sleep(0.05)
        port = address.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as response:
                targets = await response.json()
            (target,) = [one for one in targets if one["type"] == "page"]
            url = target["webSocketDebuggerUrl"]
            async with session.ws_connect(url, max_msg_size=0) as socket:
                page = Page(socket)
                listener = asyncio.create_task(page.listen())
                for domain in ("Runtime", "Log", "Page"):
                    await page.call(f"{domain}.enable")
                scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
                await page.call("Emulation.setEmulatedMedia", features=[scheme])
                await page.call("Page.navigate", url=Path(file).resolve().as_uri())
                yield page
                listener.cancel()
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(sockets, ignore_errors=True)
