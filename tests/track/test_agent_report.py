"""The report of agents: their rollouts as conversations, with branches, tools and sub-agents.

The run is of agents in this process that call real tools, with a scripted policy (agent_run.py).
"""

import json

import agent_run
import numpy as np
import pytest
from chat_tokenizer import chat_tokenizer
from report_pages import embedded, in_browser, needs_chromium

from primerl import advantage, track
from primerl.types import Group, Rollout, Sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of one step: two agents of more than 100 turns."""
    path = tmp_path_factory.mktemp("runs") / "agents"
    return agent_run.record(path, chat_tokenizer(), modules=(95,))


def records(folder):
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_bytes().splitlines()]


def sample(ids, trained):
    return Sample(
        token_ids=ids,
        loss_mask=[place in trained for place in range(len(ids))],
        behavior_logprobs=[-1.0 if place in trained else 0.0 for place in range(len(ids))],
        versions=[0 if place in trained else -1 for place in range(len(ids))],
    )


def write_run(folder, *rollouts):
    groups = [Group(task_id="t", rollouts=rollouts)]
    with track.Run(folder, args={}, decode=lambda ids: " ".join(map(str, ids))) as run:
        run.log(0, groups, advantage.assign(groups, advantage.centered))
    return folder / "report.html"


def test_a_rollout_is_one_entry_with_its_branches_and_counts(folder):
    data = embedded(folder / "report.html")
    chunks = [one for name, chunk in data.items() if "chunk" in name for one in chunk]
    rollouts = data["run-0"]["rollouts"]
    lines = records(folder)

    assert data["run-0"]["recorded"] == len(rollouts["step"]) == len(chunks) == 2
    for number, chunk in enumerate(chunks):
        own = [line for line in lines if line["rollout"] == number]
        assert [one["sample"] for one in chunk["sequences"]] == [one["sample"] for one in own]
        assert rollouts["tokens"][number] == sum(one["tokens"] for one in own)
        assert chunk["conversation"] == own[0]["conversation"]
        assert rollouts["metrics"]["turns"][number] == own[0]["metrics"]["turns"] > 100
    metrics = data["run-0"]["metrics"]
    for name in ("tool_calls", "tool_errors", "malformed_calls", "branches", "edited"):
        assert metrics[f"rollout/{name}"][0] > 0
    assert metrics["stop/stop"] == [1.0]


NEWER = ("rollout", "sample", "conversation", "tokens", "trained", "arrays")


def test_records_of_earlier_versions_have_a_report(tmp_path, folder):
    """Their arrays are in JSON, without an index."""
    old = tmp_path / "old"
    old.mkdir()
    for name in ("args.json", "summary.json", "tokens.jsonl", "metrics.jsonl"):
        (old / name).write_text((folder / name).read_text())
    whole = list(track.read_rollouts(folder))
    with (old / "rollouts.jsonl").open("w") as file:
        for line in whole:
            arrays = {name: array.tolist() for name, array in line["arrays"].items()}
            kept = {key: line[key] for key in line if key not in NEWER}
            file.write(json.dumps(kept | arrays | {"entropy": [None] * line["tokens"]}) + "\n")

    track.write_report([old])

    data = embedded(old / "report.html")
    assert data["run-0"]["recorded"] == len(whole)
    assert data["run-0"]["rollouts"]["trained"] == [line["trained"] for line in whole]
    (one,) = data["run-0-chunk-0"][0]["sequences"]
    assert one["token_ids"] == whole[0]["arrays"]["token_ids"].tolist()
    assert one["entropy"] == [None] * whole[0]["tokens"]
    for line, other in zip(track.read_rollouts(old), whole, strict=True):
        for name, array in other["arrays"].items():
            assert line["arrays"][name].dtype == array.dtype
            np.testing.assert_array_equal(line["arrays"][name], array)


def test_rollouts_of_one_task_in_several_groups_are_kept_apart(tmp_path):
    groups = [
        Group(task_id="t", rollouts=[Rollout(samples=[sample([1, 2], {1})], reward=reward)])
        for reward in (0.0, 1.0)
    ]
    with track.Run(tmp_path, args={}) as run:
        run.log(0, groups, advantage.assign(groups, advantage.centered))

    assert embedded(tmp_path / "report.html")["run-0"]["rollouts"]["reward"] == [0.0, 1.0]


# ---- in a browser ----

SECTIONS = "[...document.querySelectorAll('.conversation section')]"
HEADS = f"{SECTIONS}.map(one => one.querySelector('h3').textContent)"


def message(number, part=""):
    return f"document.querySelectorAll('.message')[{number}].querySelector('{part}').textContent"


@needs_chromium
def test_a_hundred_turns_with_branches_read_like_a_conversation(folder, tmp_path):
    conversation = records(folder)[0]["conversation"]

    async def steps(page):
        await page.click("#row-0")
        await page.until("document.querySelector('.conversation') !== null")
        assert await page.run(message(0, ".said")) == agent_run.SYSTEM
        assert (await page.run(message(1, ".said"))).startswith("How many functions")
        assert await page.run(message(2, ".reasoning")) == "I don't know the package yet."
        assert await page.run(message(2, ".call b")) == "list_files"
        assert "turn 1 · " in await page.run(message(2, ".who span"))
        assert (await page.run(message(3, ".code"))).startswith("orbit/api.py\norbit/auth.py")
        assert await page.run(message(3, ".who b")) == "list_files returned"

        heads = await page.run(HEADS)
        agents = [head.split(" · ")[1] for head in heads]
        assert len(heads) == len(conversation["branches"]) == len(agents)
        assert sorted(agents) == sorted(one["agent"] for one in conversation["branches"])
        assert set(agents) == {"policy", "reviewer", "summary"}
        turns = await page.run("document.querySelectorAll('.message.assistant').length")
        assert turns == records(folder)[0]["metrics"]["turns"]

        edits = await page.run(
            "[...document.querySelectorAll('details.changed > summary')].map(o => o.textContent)"
        )
        assert any(text.endswith("replaced by as many.") for text in edits)
        assert any(text.endswith("replaced by 1.") for text in edits)
        await page.run("document.querySelector('details.changed').open = true")
        await page.until("document.querySelectorAll('.removed .message').length > 3")
        dropped = "document.querySelector('.added .code').textContent"
        assert await page.run(dropped) == "[dropped to save space]"

        failed = await page.run(
            "[...document.querySelectorAll('.message.failed')].map(one => one.textContent)"
        )
        assert any("there is no tool 'grep'" in text for text in failed)
        assert any("the call is not JSON" in text for text in failed)
        assert any("needs the arguments ['path']" in text for text in failed)

    in_browser(folder / "report.html", tmp_path, steps)


@needs_chromium
def test_branches_long_results_and_tokens_are_a_click_away(folder, tmp_path):
    first = records(folder)[0]
    listing = next(one for one in first["conversation"]["messages"] if one["role"] == "tool")

    async def steps(page):
        await page.click("#row-0")
        await page.until("document.querySelector('.conversation') !== null")
        await page.click(".message.tool .link")  # show all
        assert await page.run(message(3, ".code")) == listing["content"]
        bars = "[...document.querySelectorAll('.lane button')]"
        await page.run(f"{bars}.find(one => one.title.includes('reviewer')).click()")
        shown = "document.activeElement.querySelector('h3').textContent"
        assert "reviewer" in await page.run(shown)
        await page.run("document.querySelector('section > .link').click()")  # from its caller
        assert "reviewer" in await page.run(shown)
        # The messages before have estimated heights until they are drawn.
        await page.run(f"{bars}.at(-1).click()")
        await page.run(f"{bars}[1].click()")
        below = (
            "document.activeElement.getBoundingClientRect().top"
            " - document.querySelector('.lanes').getBoundingClientRect().bottom"
        )
        await page.until(f"Math.abs({below}) < 40")

        await page.run("document.getElementById('list').focus()")
        for _ in range(4):
            await page.press("c")
        await page.until("document.querySelectorAll('.message .trained').length > 0")
        colored = "[...document.querySelectorAll('.message .trained')].length"
        trained = sum(line["trained"] for line in records(folder) if not line["rollout"])
        assert await page.run(colored) == trained
        said = await page.run("document.querySelector('.message .text').textContent")
        assert said.startswith("<think>I don't know the package yet.</think>\n<tool_call>")
        await page.press("t")
        await page.until("document.querySelector('.conversation') === null")
        sequences = sum(not line["rollout"] for line in records(folder))
        assert await page.run("document.querySelectorAll('article .text').length") == sequences

    in_browser(folder / "report.html", tmp_path, steps, dark=True)


@needs_chromium
def test_a_click_on_a_curve_opens_the_rollout_behind_it(tmp_path):
    folder = agent_run.record(tmp_path / "run", chat_tokenizer(), steps=3, modules=(3, 8, 4))
    most = max(
        (line for line in records(folder) if line["step"] == 1),
        key=lambda line: line["metrics"]["turns"],
    )
    titles = "[...document.querySelectorAll('#charts figure')]"

    async def steps(page):
        await page.run(
            f"{titles}.find(one => one.textContent.startsWith('turns per rollout')).id = 'turns'"
        )
        await page.click("#turns svg")  # its middle: step 1 of 0 to 2
        await page.until("document.querySelector('article .conversation') !== null")
        assert await page.run("document.getElementById('count').textContent") == "2 of 6 rollouts"
        assert await page.run("document.getElementById('order').value") == "turns"
        counts = await page.run("document.querySelector('.counts').textContent")
        assert counts.startswith(f"{most['metrics']['turns']:.0f} turns")
        charts = await page.run(f"{titles}.map(one => one.querySelector('strong').textContent)")
        assert {"turns per rollout", "tool calls", "branches", "stop"} <= set(charts)

    in_browser(folder / "report.html", tmp_path, steps)


@needs_chromium
def test_nothing_that_a_model_or_a_tool_writes_is_run(tmp_path):
    attack = "</script><script>window.attacked = 1</script><img src=x onerror='attacked = 1'>"
    arguments = [json.dumps({attack: attack}), attack, '{"__proto__": {"a": 1}}', "[1]", ""]
    calls = [{"id": attack, "function": {"name": attack, "arguments": text}} for text in arguments]
    messages = [
        {"role": attack, "content": attack},
        {
            "role": "assistant",
            "content": attack,
            "reasoning_content": attack,
            "tool_calls": calls,
        },
        {"role": "tool", "content": "\x00\ud800" + attack, "name": attack},
    ]
    branches = [
        {"agent": attack, "origin": attack, "messages": messages, "turns": [None, 1, None]},
        {"agent": "constructor", "origin": "fork", "messages": [*messages[:1], *messages[2:]]},
    ]
    conversation = {"messages": messages, "branches": branches}
    rollout = Rollout(
        samples=[sample([1, 2], {1})],
        reward=1.0,
        stop=attack,
        metrics={attack: 1.0, "constructor": 2.0, "__proto__": 3.0},
        conversation=conversation,
    )
    report = write_run(tmp_path, rollout)

    async def steps(page):
        await page.click("#row-0")
        await page.until("document.querySelector('.conversation') !== null")
        assert await page.run("window.attacked === undefined")
        assert (
            await page.run("document.querySelectorAll('article img, article script').length") == 0
        )
        text = await page.run("document.querySelector('.conversation').textContent")
        assert text.count("onerror") >= 8

    in_browser(report, tmp_path, steps)


@needs_chromium
def test_a_conversation_without_branches_is_shown_with_its_tokens(tmp_path):
    messages = [
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "Three?"},
        {"role": "assistant", "content": "3"},
    ]
    rollout = Rollout(
        samples=[sample([5, 7, 8, 5, 9], {1, 2, 4})],
        reward=1.0,
        conversation={"messages": messages},
    )
    report = write_run(tmp_path, rollout)

    async def steps(page):
        await page.click("#row-0")
        await page.until("document.querySelector('.conversation') !== null")
        assert await page.run("document.querySelector('.lanes')") is None
        facts = "[...document.querySelectorAll('.assistant .who span')].map(one => one.textContent)"
        assert await page.run(facts) == [
            "turn 1 · 2 tokens · version 0",
            "turn 2 · 1 token · version 0",
        ]
        await page.press("c")
        await page.until("document.querySelectorAll('.message .trained').length === 3")

    in_browser(report, tmp_path, steps)
