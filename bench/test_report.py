"""Time to write and open run reports.

One run has 10,000 rollouts of 200 tokens. Another has a rollout of an agent with more than 100
turns and with branches, which is opened in its report. Run `make bench ARGS=bench/test_report.py`;
opening a report needs Chromium.
"""

import asyncio

import agent_run
import browser
import numpy as np
import pytest
from chat_tokenizer import chat_tokenizer

from primerl import advantage, track
from primerl.types import Group, Rollout, Sample

STEPS, GROUPS, SIZE, TOKENS = 25, 50, 8, 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    draw = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("runs") / "run"
    mask = np.arange(TOKENS) >= 50

    def play(step):
        sample = Sample(
            token_ids=draw.integers(0, 5000, TOKENS),
            loss_mask=mask,
            behavior_logprobs=np.where(mask, -draw.exponential(1.0, TOKENS), 0.0),
            versions=np.where(mask, step, -1),
            temperature=1.0,
        )
        return Rollout(samples=[sample], reward=float(draw.random()))

    with track.Run(path, decode=lambda ids: " ".join(map(str, ids))) as run:
        for step in range(STEPS):
            groups = [
                Group(task_id=f"task {n}", rollouts=[play(step) for _ in range(SIZE)])
                for n in range(GROUPS)
            ]
            run.log(step, groups, advantage.assign(groups, advantage.centered))
    return path


def test_write(benchmark, folder):
    path = benchmark.pedantic(track.write_report, args=([folder],), rounds=3)

    sizes = [one.stat().st_size / 2**20 for one in (path, folder / "rollouts.jsonl")]
    print("\n{:.1f} MiB, of {:.1f} MiB that were recorded".format(*sizes))


@pytest.mark.skipif(browser.CHROMIUM is None, reason="needs a Chromium")
def test_open(benchmark, folder, tmp_path):
    """Open the report. The time includes the start of the browser; the page's own is printed."""
    times = []

    async def visit():
        profile = tmp_path / str(len(times))
        async with browser.opened(folder / "report.html", profile) as page:
            await page.until("document.body?.dataset.ready === 'true'")
            measure = "performance.measure('all', {start: 0, end: 'ready'}).duration"
            times.append(await page.run(measure))

    benchmark.pedantic(lambda: asyncio.run(visit()), rounds=3)

    print(f"\nready after {', '.join(f'{time:.0f}' for time in times)} ms")


@pytest.mark.skipif(browser.CHROMIUM is None, reason="needs a Chromium")
def test_open_a_rollout_of_an_agent(benchmark, tmp_path):
    """Print the time from the click in the list until the conversation is painted."""
    folder = agent_run.record(tmp_path / "agents", chat_tokenizer())
    times = []
    opening = """(async () => {
        const began = performance.now();
        await select(0);
        await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
        return performance.now() - began;
    })()"""

    async def visit():
        profile = tmp_path / str(len(times))
        async with browser.opened(folder / "report.html", profile) as page:
            await page.until("document.body?.dataset.ready === 'true'")
            times.append(await page.run(opening))
            turns = await page.run("document.querySelectorAll('.message.assistant').length")
            sections = await page.run("document.querySelectorAll('.conversation section').length")
            assert turns > 100
            assert sections > 3

    benchmark.pedantic(lambda: asyncio.run(visit()), rounds=3)

    print(f"\nopen after {', '.join(f'{time:.0f}' for time in times)} ms")
