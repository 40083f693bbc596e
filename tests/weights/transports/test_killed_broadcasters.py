"""Ranks that are killed in the middle of a broadcast, while the servers live on."""

import contextlib
import json
import threading
from multiprocessing.connection import Client, Listener

import pytest
from forked_ranks import forked_ranks
from publishing import BroadcastReplicas, same_bits

from primerl import models, testing
from primerl._common.threads import in_thread


class LivingServers:
    """Servers of one and two workers that answer a trainer in other processes."""

    def __init__(self, address):
        self.replicas = BroadcastReplicas(1, 2)
        self.errors = []
        self.answered = threading.Event()
        self._listener = Listener(str(address))
        self._accepting = in_thread(self._accept)

    def _accept(self):
        while True:
            with self._listener.accept() as connection:
                question = connection.recv()
                if question == "end":
                    return
                self.answered.clear()
                answer = self._answer(question)
                with contextlib.suppress(OSError):  # the trainer may have died
                    connection.send(answer)
                self.answered.set()

    def close(self):
        with Client(self._listener.address) as connection:
            connection.send("end")
        self._accepting.result(10.0)
        self._listener.close()

    def _answer(self, update):
        if update is None:
            return self.replicas.workers(), ""
        try:
            return self.replicas.load_weights(update, version=update["version"], send=int), ""
        except RuntimeError as error:
            self.errors.append(str(error))
            return None, str(error)


@pytest.fixture(scope="module", params=[0, 1], ids=["rank 0", "rank 1"])
def runs(request, root, tmp_path_factory):
    """The rank that is killed, and the servers' tensors and errors after two runs of two ranks."""
    killed, folder = request.param, tmp_path_factory.mktemp("killed")
    servers = LivingServers(folder / "servers")
    program = root / "tests/ranks/killed_broadcasters.py"
    found = {}
    for name, versions, dies in (("dying", [1, 2], killed), ("after", [3], -1)):
        done = forked_ranks(
            program, name, folder, versions, dies, ranks=2, cwd=folder, timeout_s=120
        )
        assert servers.answered.wait(60.0)
        told = {
            rank: json.loads(path.read_text())
            for rank in range(2)
            if (path := folder / f"{name}-{rank}.json").exists()
        }
        assert told, done.stderr[-5000:]
        found[name] = told, dict(servers.replicas.tensors), list(servers.errors)
    servers.close()
    return killed, found


def tensors_of(version):
    model = testing.tiny_model("llama", seed=version, num_hidden_layers=6)
    return dict(models.checkpoint_tensors(model))


def test_the_other_rank_names_the_rank_that_died(runs):
    killed, found = runs
    told, _, _ = found["dying"]
    other = 1 - killed

    assert sorted(told) == [other]
    assert told[other]["ended"].startswith(
        f"rank {other} stopped: rank {killed} died without an error"
    )


def test_servers_give_up_in_time_and_keep_their_version(runs):
    _, found = runs
    _, tensors, errors = found["dying"]

    assert len(errors) == 1
    assert "did not arrive: the trainer's broadcast took longer than 5 s" in errors[0]
    assert len(tensors) == 3
    assert all(same_bits(one, tensors_of(1)) for one in tensors.values())


def test_the_next_run_publishes_to_the_same_servers(runs):
    _, found = runs
    told, tensors, errors = found["after"]

    assert [told[rank]["ended"] for rank in (0, 1)] == [None, None]
    assert len(errors) == 1
    assert all(same_bits(one, tensors_of(3)) for one in tensors.values())
