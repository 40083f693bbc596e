"""Command-line agents for tests, which call the gateway named in their environment variables.

Run ``python command_agents.py KIND``. The agents use only the standard library.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def ask(messages, tools=None):
    body = {"model": "policy", "messages": messages, **({"tools": tools} if tools else {})}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]


def shell(turns=20):
    """Run the commands in the policy's replies until one is ``exit``."""
    messages = [{"role": "user", "content": Path("task.txt").read_text(encoding="utf-8")}]
    for _ in range(turns):
        reply = ask(messages)
        if reply["content"] == "exit":
            return
        done = subprocess.run(reply["content"], shell=True, capture_output=True, encoding="utf-8")
        messages += [reply, {"role": "user", "content": done.stdout + done.stderr}]


def endless():
    messages = [{"role": "user", "content": "Go on."}]
    while True:
        try:
            messages += [ask(messages), {"role": "user", "content": "Go on."}]
        except urllib.error.HTTPError:
            time.sleep(0.01)  # retry forever


def loud():
    ask([{"role": "user", "content": "Shout."}])
    for _ in range(100):
        sys.stdout.buffer.write(b"\xff" * 1_000_000)


def crash():
    ask([{"role": "user", "content": "Crash."}])
    sys.exit(3)


def orphan():
    ask([{"role": "user", "content": "Leave a child."}])
    subprocess.Popen(["sleep", "600"])


if __name__ == "__main__":
    {"shell": shell, "endless": endless, "loud": loud, "crash": crash, "orphan": orphan}[
        sys.argv[1]
    ]()
