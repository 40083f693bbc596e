"""What ``vllm-router`` keeps of this package's promises, in front of two real servers.

It needs a virtual environment of its own (``pip install vllm-router``), and its command in PATH.
docs/vllm.md, "Routers", says what follows from this test.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from publishing import logprobs_of
from waiting import until

from primerl import models, serving, weights
from primerl.serving.names import GENERATE
from primerl.serving.protocol import requests, responses
from primerl.serving.server.readiness import free_port
from primerl.types import SamplingParams

ROUTER = shutil.which("vllm-router")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(ROUTER is None, reason="the command vllm-router is not in PATH"),
]
KEY = "of the test"
CLOSE = 5e-5  # of logprobs in float32


@contextlib.contextmanager
def router(*flags, log_path):
    """A router with these flags; yields its url."""
    port = free_port("127.0.0.1")
    metrics = ("--prometheus-port", str(free_port("127.0.0.1")))
    command = [ROUTER, "--port", str(port), *metrics, *flags]
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: answers(f"{url}/health"))
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def ask(url, prompt, *, session, salt="v3", tokens=4, seed=0):
    """Send a prompt as the engine does, and return the response."""
    params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed)
    body = requests.generate_body(params, salt=salt) | {"token_ids": prompt}
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {KEY}",
        "X-Session-Id": session,
    }
    request = urllib.request.Request(url + GENERATE, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=240) as response:
        return msgspec.json.decode(response.read(), type=responses.Response)


def test_generation_through_a_router(dense, tmp_path):
    settings = {"dtype": "float32", "max_model_len": 1024, "max_num_batched_tokens": 512}
    servers = [
        serving.serve_vllm(dense, api_key=KEY, env={"VLLM_CPU_KVCACHE_SPACE": "1"}, **settings)
        for _ in range(2)
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one.start(), servers))
    model, _ = models.load_pretrained(dense)
    with (
        contextlib.ExitStack() as stack,
        serving.VLLMEngine(servers, run="ours") as engine,
        router(
            *("--policy", "consistent_hash", "--worker-urls", *(one.url for one in servers)),
            log_path=tmp_path / "router.log",
        ) as url,
    ):
        for one in servers:
            stack.callback(one.close)
        weights.SharedMemory(model, engine).publish(3)  # gone when the other server returns
        rng = np.random.default_rng(0)
        prompts = [rng.integers(2, 512, 100).tolist() for _ in range(12)]

        def labels(answer):
            return {span.version for choice in answer.choices for span in choice.weight_versions}

        for number, prompt in enumerate(prompts):
            answer = ask(url, prompt, session=f"session {number}", salt="v3")
            completion = responses.make_completion(answer.choices[0], [3] * 4)
            own = logprobs_of(model, [*prompt, *completion.token_ids.tolist()])[-4:].numpy()
            assert np.abs(own - completion.logprobs).max() < CLOSE
            assert labels(answer) == {"ours-3"}

        # A server dies: some of its requests are sent to the other one, and some end with 500.
        with ThreadPoolExecutor() as pool:
            asked = [
                pool.submit(status, url, prompts[0], session=f"long {number}", tokens=60)
                for number in range(8)
            ]
            os.kill(servers[1].pid, signal.SIGKILL)
            found = [one.result() for one in asked]
        assert {*found} <= {200, 500}

        # It is restarted, with the checkpoint's weights, and the router uses it again.
        servers[1].restart()
        sessions = itertools.count()

        def is_used():
            session = f"later {next(sessions)}"
            return labels(ask(url, prompts[0], session=session)) != {"ours-3"}

        until(is_used, within_s=300)


def status(url, *args, **settings):
    try:
        ask(url, *args, **settings)
    except urllib.error.HTTPError as error:
        return error.code
    return 200
