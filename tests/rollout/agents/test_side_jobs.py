"""Side jobs of agents, such as titles: recognized, and left out of training if so wished."""

import pytest
from chat_tokenizer import tool_call, trained
from gateway_posts import played

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def conversation(system, text, tools=None):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return {"messages": messages, **({"tools": tools} if tools else {})}


async def turn(posts, body, following=None):
    _, answer = await posts.post("/chat/completions", body)
    said = answer["choices"][0]["message"]
    if following is not None:
        result = {"role": "user", "content": following}
        if said.get("tool_calls"):
            identity = said["tool_calls"][0]["id"]
            result = {"role": "tool", "tool_call_id": identity, "content": following}
        body["messages"] += [said, result]


def script(prompt, number):
    if "title" in prompt:
        return "A title"
    return tool_call("look") if "open" not in prompt else "Done."


@pytest.mark.parametrize("order", ["first", "last"])
def test_a_title_is_a_side_job(order):
    async def talk(posts):
        title = conversation("Write a title.", "a title, please")
        task = conversation("You are an agent.", "Look.", TOOLS)
        if order == "first":
            await turn(posts, title)
        await turn(posts, task, "It is open.")
        await turn(posts, task)
        if order == "last":
            await turn(posts, title)

    session, engine, _ = played(talk, script)
    (job,) = session.history.side_jobs()
    assert engine.tokenizer.decode(job.completion.token_ids) == "A title<|im_end|>"

    everything = session.rollout(reward=1.0, keep_conversation=True)
    assert trained(everything.samples) == engine.sampled
    assert everything.metrics["side_jobs"] == 1
    marks = [branch["side_job"] for branch in everything.conversation["branches"]]
    assert sorted(marks) == [False, True]

    without = session.rollout(reward=1.0, side_jobs=False, keep_conversation=True)
    assert len(without.samples) == 1
    assert "A title" not in engine.tokenizer.decode(without.samples[0].token_ids)
    samples = {branch["side_job"]: branch["sample"] for branch in without.conversation["branches"]}
    assert samples == {False: 0, True: None}


def test_a_commit_message_of_an_agent_without_tools_is_a_side_job():
    async def talk(posts):
        task = conversation("You edit code.", "Fix it.")
        await turn(posts, task, "More")
        await turn(posts, task)
        await turn(posts, conversation("Write a commit message.", "a title, please"))

    session, _, _ = played(talk, lambda prompt, _: "A title" if "title" in prompt else "Edited.")
    assert len(session.history.side_jobs()) == 1


def test_single_replies_beside_each_other_are_no_side_jobs():
    """None of them is the main one: a pipeline of prompts is trained."""

    async def talk(posts):
        for number in range(3):
            await turn(posts, conversation(f"Role {number}.", "Go"))

    session, _, _ = played(talk, lambda *_: "Done.")
    assert session.history.side_jobs() == []


def test_sub_agents_with_tools_are_no_side_jobs():
    async def talk(posts):
        task = conversation("You are an agent.", "Look.", TOOLS)
        await turn(posts, task, "It is open.")
        await turn(posts, task)
        await turn(posts, conversation("You are a helper.", "Look, too.", TOOLS))

    session, _, _ = played(talk, script)
    assert session.history.side_jobs() == []


def test_a_conversation_of_several_replies_is_no_side_job():
    async def talk(posts):
        task = conversation("You are an agent.", "Look.", TOOLS)
        await turn(posts, task, "It is open.")
        await turn(posts, task, "Go on, it is open.")
        await turn(posts, task)
        helper = conversation("You are a helper.", "It is open.")
        await turn(posts, helper, "More")
        await turn(posts, helper)

    session, _, _ = played(talk, script)
    assert session.history.side_jobs() == []


def test_each_agent_has_side_jobs_of_its_own():
    async def talk(posts):
        task = conversation("You are an agent.", "Look.", TOOLS)
        await turn(posts, task, "It is open.")
        await turn(posts, task)
        key = posts.session.key_for("reviewer")
        body = conversation("You review.", "Well?")
        await posts.post("/chat/completions", body, key=key)

    session, _, _ = played(talk, script)
    assert session.history.side_jobs() == []
