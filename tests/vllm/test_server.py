"""``serve_vllm`` with the real vLLM: its routes, its errors, its death.

Issue 5, Shows 6: no route without the key.
"""

import httpx
import psutil
import pytest

from primerl import serving
from primerl.serving.server.middleware import OPEN_PATHS

ADMIN = {
    "/abort_requests",
    "/collective_rpc",
    "/finish_weight_update",
    "/init_weight_transfer_engine",
    "/is_paused",
    "/pause",
    "/reset_prefix_cache",
    "/resume",
    "/sleep",
    "/start_weight_update",
    "/update_weights",
    "/wake_up",
    "/weight_info",
}


def client(server, key=None):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=server.url, headers=headers, timeout=30, trust_env=False)


def test_it_serves_tokens(server):
    with client(server, server.api_key) as http:
        answer = http.post(
            "/inference/v1/generate",
            json={
                "token_ids": [10, 11, 12],
                "sampling_params": {"max_tokens": 3, "logprobs": 0, "ignore_eos": True},
            },
        )

    [choice] = answer.raise_for_status().json()["choices"]
    assert len(choice["token_ids"]) == 3
    assert all(one["logprob"] <= 0 for one in choice["logprobs"]["content"])
    assert server.alive


def test_every_route_needs_the_key(server):
    """The routes are those that the running server lists, so one of a new version is covered."""
    with client(server, server.api_key) as allowed:
        paths = allowed.get("/openapi.json").json()["paths"]
    assert set(paths) >= ADMIN
    unlisted = {"/metrics": ["get"], "/docs": ["get"], "/openapi.json": ["get"], "/no": ["get"]}
    routes = [(path, method) for path in paths for method in paths[path]]
    routes += [(path, method) for path in unlisted for method in unlisted[path]]
    routes += [("/pause", method) for method in ("options", "head", "put")]
    with client(server) as without_key, client(server, "wrong") as wrong_key:
        for path, method in routes:
            for http in (without_key, wrong_key):
                status = http.request(method.upper(), path).status_code
                assert status == (200 if path in OPEN_PATHS else 401), f"{method} {path}"


def test_with_the_key_the_administrative_routes_work(server):
    with client(server, server.api_key) as http:
        for path in ("/weight_info", "/metrics", "/v1/models", "/get_world_size"):
            assert http.get(path).status_code == 200
        assert http.post("/pause", params={"mode": "wait"}).status_code == 200
        assert http.get("/is_paused").json() == {"is_paused": True}
        assert http.post("/resume").status_code == 200
        assert http.post("/reset_prefix_cache").status_code == 200
        receipt = http.post("/collective_rpc", json={"method": "weight_receipt"})
        assert receipt.status_code == 200


def test_the_key_is_in_no_log_and_no_command_line(server):
    assert server.api_key not in server.log_path.read_text(errors="replace")
    holder = psutil.Process(server.pid)
    for process in [holder, *holder.children(recursive=True)]:
        assert server.api_key not in " ".join(process.cmdline())


def test_a_wrong_argument_raises_with_the_end_of_the_log(tied_experts):
    server = serving.serve_vllm(tied_experts, no_such_argument=1)
    with pytest.raises(RuntimeError) as caught:
        server.start()

    message = str(caught.value)
    assert "(exit code 2): vLLM refuses an argument: unrecognized arguments" in message
    assert "--no-such-argument" in message
    assert "usage:" in message or "api_server.py: error" in message


def test_a_server_started_by_the_user_reads_the_key_from_its_environment(pair):
    _, by_hand = pair
    with client(by_hand) as without_key, client(by_hand, by_hand.api_key) as allowed:
        assert without_key.get("/weight_info").status_code == 401
        assert allowed.get("/weight_info").status_code == 200
