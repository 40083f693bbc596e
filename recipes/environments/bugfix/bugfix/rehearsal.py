"""A tiny policy for rehearsals, which fixes the bugs of one program in about half of its rollouts.

    policy(folder, "glm4_moe", seed=0)
    rollout.verifiers("bugfix", tokenizer=tokenizer, config={"taskset": OPTIONS})

A policy with random weights never solves a task, so all its rewards are equal and it never trains.
This one imitates two agents for a few seconds: the scripted expert, which rewrites the program, and
an agent that does nothing and says that the bug is fixed. So the rewards of a group differ, with
real tool calls, sandboxes and hidden tests.
"""

import asyncio
import contextlib
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bugfix import expert
from primerl import testing

OPTIONS = {"tier": "easiest", "program": "last_word"}  # the shortest program: 60 tokens
VOCABULARY = 480
# Steps and learning rate of each phase; together six seconds on one core. With seeds 0 to 4, the
# policy then solves each task with a probability of 0.43 to 0.52, also in FP8.
PHASES = ((150, 7e-3), (40, 2e-3))


def policy(
    folder: str | os.PathLike[str], model_type: str, *, seed: int = 0, **config: Any
) -> Path:
    """Write a tiny policy and its tokenizer as a Hugging Face folder.

    An existing folder is returned as it is. Several processes may call this at once.

    Args:
        folder: the folder to create.
        model_type: as in ``testing.tiny_model``.
        seed: seed of the initialization, and of the order of the tasks.
        config: settings that override those of ``testing.tiny_model``.

    Raises:
        SandboxError: the expert could not work, because no sandbox could be created.
    """
    folder = Path(folder)
    if (folder / "config.json").is_file():
        return folder
    conversations = played()
    plain = testing.chat_tokenizer()
    texts = [rendered(plain, one, one["messages"]) for one in conversations]
    tokenizer = testing.chat_tokenizer(texts, vocab_size=VOCABULARY)
    model = testing.tiny_model(model_type, seed=seed, vocab_size=len(tokenizer), **config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    order = random.Random(seed)
    with one_thread():
        for steps, lr in PHASES:
            lessons = (lesson(tokenizer, order.choice(conversations)) for _ in range(steps))
            testing.imitate(model, tokenizer, lessons, lr=lr)
    return testing.save_once(model, folder, tokenizer=tokenizer)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread of torch: faster for so small products, above all on a busy CPU."""
    import torch  # here, so that agents and graders don't load torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def played() -> list[dict[str, Any]]:
    """Return the expert's conversations on the tasks of ``OPTIONS``."""
    playing = expert.conversations(
        [OPTIONS["tier"]], split="train", program=OPTIONS["program"], rewrite=True
    )
    conversations = asyncio.run(playing)
    for conversation in conversations:
        for message in conversation["messages"]:
            for call in message.get("tool_calls") or ():
                function = call["function"]
                function["arguments"] = json.loads(function["arguments"])
    return conversations


def lesson(tokenizer: Any, conversation: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return pairs of a prompt and a reply: the expert's, and that of the agent without a call."""
    [call, done] = replies(tokenizer, conversation)
    [idle] = replies(tokenizer, expert.without_calls(conversation))
    return [call, done, idle]


def rendered(
    tokenizer: Any,
    conversation: Mapping[str, Any],
    messages: Sequence[Any],
    *,
    prompt: bool = False,
) -> str:
    """Return the text of some messages; with ``prompt``, followed by the beginning of a reply."""
    return tokenizer.apply_chat_template(  # type: ignore[no-any-return]
        messages, tools=conversation["tools"], tokenize=False, add_generation_prompt=prompt
    )


def replies(tokenizer: Any, conversation: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each reply of a conversation, after the prompt that it replies to."""
    messages = conversation["messages"]
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = rendered(tokenizer, conversation, messages[:number], prompt=True)
            text = rendered(tokenizer, conversation, messages[: number + 1])
            yield prompt, text.removeprefix(prompt).removesuffix("<|im_end|>\n")
