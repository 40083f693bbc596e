"""The reasons why a rollout has more than one branch, from its recorded conversation."""

import json


def reasons(conversation):
    """Return one line for each branch but the first: where it leaves an earlier one, and how."""
    branches = conversation["branches"]
    lines = []
    for number, branch in enumerate(branches[1:], start=2):
        earlier = max(branches[: number - 1], key=lambda one: _shared(one, branch))
        shared = _shared(earlier, branch)
        where = f"branch {number} ({branch['origin']}), message {shared + 1}"
        if earlier["tools"] != branch["tools"]:
            lines.append(f"{where}: other tools")
        elif shared < min(len(earlier["messages"]), len(branch["messages"])):
            before, now = _plain(earlier["messages"][shared]), _plain(branch["messages"][shared])
            lines += [
                f"{where}: {key} was {_short(before.get(key))}, is {_short(now.get(key))}"
                for key in sorted({*before, *now})
                if before.get(key) != now.get(key)
            ]
        else:
            lines.append(f"{where}: the messages are the same up to here")
    return lines


def _shared(one, other):
    """Count the messages with which both branches begin."""
    pairs = zip(one["messages"], other["messages"], strict=False)
    return next(
        (index for index, (before, now) in enumerate(pairs) if _plain(before) != _plain(now)),
        min(len(one["messages"]), len(other["messages"])),
    )


def _plain(message):
    """Return a message with the arguments of its calls as values, whose spaces do not matter."""
    if not message.get("tool_calls"):
        return message
    calls = [(call["id"], call["function"]) for call in message["tool_calls"]]
    arguments = [(name, said["name"], json.loads(said["arguments"])) for name, said in calls]
    return {**message, "tool_calls": arguments}


def _short(value):
    text = json.dumps(value)
    return text if len(text) <= 300 else f"{text[:150]} ... {text[-150:]}"
