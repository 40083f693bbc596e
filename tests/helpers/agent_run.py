"""A run of agents without a model: a scripted policy counts calls in an invented package.

The policy reads one module per turn with real tools, and covers all situations of agents: calls
that are malformed, name an unknown tool, or fail; results that are too long; history that is
dropped or summarized, which begins a branch; and a reviewer that is asked as a sub-agent.
"""

import asyncio
import json
import random
import re

from primerl import advantage, rollout, testing, track
from primerl.rollout import AgentLimits, Tool
from primerl.types import Group, SamplingParams

SYSTEM = (
    "You answer questions about Python packages that you can't run. Read modules with the tools, "
    "one in each turn, and keep count. Reply without a call when you know the answer."
)
REVIEWER = "You review the work of another agent. Read what you doubt, then say what you found."
NAMES = (
    "api", "auth", "cache", "cli", "client", "codec", "config", "cursor", "errors", "events",
    "files", "graph", "http", "index", "jobs", "limits", "locks", "log", "mail", "metrics",
    "models", "parser", "paths", "pool", "proxy", "queue", "render", "router", "rules", "schema",
)  # fmt: skip
VERBS = (
    "load", "save", "open", "send", "fetch", "close", "check", "merge", "parse", "build", "find",
    "drop", "sync", "read",
)  # fmt: skip


def package(draw, modules):
    """Make a package; return its files and the number of functions that call ``retry``."""
    files, count = {}, 0
    for number in range(modules):
        name = NAMES[number % len(NAMES)] + ("" if number < len(NAMES) else f"_{number}")
        lines = [f'"""The {name} of orbit."""', "", "from orbit.retrying import retry", ""]
        functions = 60 if number == 7 else draw.randrange(1, 4)
        for verb in (VERBS * 5)[:functions]:
            retries = draw.random() < 0.3
            count += retries
            call = f"retry(lambda: item.{verb}(), times=3)" if retries else f"item.{verb}()"
            lines += ["", f"def {verb}_{name}_{len(lines)}(item, *, timeout_s=30.0):"]
            lines += [f"    result = {call}", "    return [] if result is None else result", ""]
        files[f"orbit/{name}.py"] = "\n".join(lines)
    return files, count


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def policy(files, answer, draw, mistakes):
    """Yield the counting agent's replies; ``mistakes`` is the chance of a mistake per turn."""
    yield "<think>I don't know the package yet.</think>\n" + call("list_files")
    found = 0
    for number, (path, text) in enumerate(files.items(), start=1):
        if draw.random() < mistakes:
            unclosed = f'{{"name": "read_file", "arguments": {{"path": "{path}"'
            yield draw.choice(
                [
                    f"<tool_call>\n{unclosed}\n</tool_call>",
                    "Searching would be quicker.\n" + call("grep", pattern="retry("),
                    call("read_file", path=path.replace("orbit/", "orbit/core/")),
                    call("read_file", file=path),
                ]
            )
        here = text.count("= retry(")
        found += here
        thought = f"{number} of {len(files)}; {found - here} functions so far. Next is {path}."
        said = f"Found {found - here} in {number - 1} modules.\n" if number % 8 == 0 else ""
        yield f"<think>{thought}</think>\n{said}" + call("read_file", path=path)
        if number == len(files) // 2:
            yield "Before I go on, somebody should check my count.\n" + call(
                "ask_reviewer", question=f"I count {found} functions until {path}. Is that right?"
            )
    yield f"**{answer}** functions of `orbit` call `retry`."


class Script:
    """Replies depending on the prompt: as the counting agent, its reviewer, or its summarizer."""

    def __init__(self, tokenizer, replies, files):
        self._tokenizer = tokenizer
        self._replies = replies
        self._files = list(files)
        self._reviews = 0

    def __call__(self, prompt_ids, number):
        head = self._tokenizer.decode(prompt_ids[:600])
        tail = self._tokenizer.decode(prompt_ids[-600:])
        if REVIEWER in head:
            self._reviews += 1
            if self._reviews % 3 == 0:
                return "The count is right in the two modules that I read."
            return "Let me look.\n" + call("read_file", path=self._files[self._reviews])
        if "Summarise the conversation" in tail:
            counts = re.findall(
                r"(\d+ of \d+); (\d+) functions", self._tokenizer.decode(prompt_ids)
            )
            read, functions = counts[-1] if counts else ("none", "0")
            return f"Modules read: {read}. Functions that call retry: {functions}. Go on reading."
        return next(self._replies)


def tools_of(files, ask):
    """Return the agent's tools: two functions over ``files``, and a question to its reviewer."""
    text = {"type": "string"}

    def read_file(arguments, state):
        path = arguments["path"]
        return files.get(path, f"error: there is no module {path}")

    reading = Tool(
        name="read_file",
        description="The text of a module.",
        parameters={"type": "object", "properties": {"path": text}, "required": ["path"]},
        call=read_file,
    )
    listing = Tool(
        name="list_files",
        description="The paths of all modules.",
        parameters={"type": "object", "properties": {}},
        call=lambda arguments, state: "\n".join(files),
    )
    asking = Tool(
        name="ask_reviewer",
        description="A second opinion.",
        parameters={"type": "object", "properties": {"question": text}, "required": ["question"]},
        call=lambda arguments, state: ask(arguments["question"], [reading]),
    )
    return [listing, reading, asking]


async def play(tokenizer, *, seed, modules, mistakes, right, version=0, context=12_000):
    """Play a rollout; ``right`` is the chance of a right answer, ``context`` is in characters."""
    draw = random.Random(seed)
    files, count = package(draw, modules)
    answer = count if draw.random() < right else count - 1
    script = Script(tokenizer, policy(files, answer, draw, mistakes), files)
    engine = testing.ScriptedEngine(script, tokenizer=tokenizer, context_length=1 << 20)
    engine.update_weights({}, version=version)
    params = SamplingParams(max_tokens=4096)
    history = rollout.History(engine, rollout.load_renderer(tokenizer), params)
    limits = AgentLimits(max_turns=200, max_output=4000)
    drop = rollout.drop_tool_results(over=context, to=context // 3)
    summarise = rollout.summarise(over=context // 3)

    async def manage(messages, ask):
        """Drop results of tools; once the messages alone are too long, summarize."""
        shorter = await drop(messages, ask)
        return messages if shorter is messages else await summarise(shorter, ask)

    async def ask_reviewer(question, tools):
        messages = [
            {"role": "system", "content": REVIEWER},
            {"role": "user", "content": question},
        ]
        review = await rollout.run_agent(
            history, messages, tools=tools, limits=limits, agent="reviewer"
        )
        return review.reply

    question = "How many functions of the package `orbit` call `retry`?"
    run = await rollout.run_agent(
        history,
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        tools=tools_of(files, ask_reviewer),
        limits=limits,
        manage_context=manage,
    )
    return run.rollout(reward=float(f"**{count}**" in run.reply), keep_conversation=True)


def record(folder, tokenizer, *, steps=1, groups=1, size=2, modules=(95,), seed=0):
    """Record a run whose agents learn to avoid mistakes; tasks take turns with ``modules``."""
    draw = random.Random(seed)
    with track.Run(folder, args={"seed": seed}, decode=tokenizer.decode) as run:
        for step in range(steps):
            learned = step / max(1, steps - 1)
            taken = []
            for number in range(groups):
                played = [
                    asyncio.run(
                        play(
                            tokenizer,
                            seed=draw.random(),
                            modules=modules[(step * groups + number) % len(modules)],
                            mistakes=0.25 - 0.22 * learned,
                            right=0.3 + 0.6 * learned,
                            version=step,
                        )
                    )
                    for _ in range(size)
                ]
                taken.append(Group(task_id=f"orbit-{step * groups + number}", rollouts=played))
            run.log(step, taken, advantage.assign(taken, advantage.centered))
        run.finish()
    return folder
