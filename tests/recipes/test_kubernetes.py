"""recipes/kubernetes/glm_swe.yaml: against the schema of Kubernetes, and against the recipe."""

import inspect
import json
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import attrs
import pytest
import yaml
from cluster_commands import (
    launched,
    over_nodes,
    planned_storage,
    recipe_arguments,
    served,
    served_by_recipe,
    sharing,
)
from glm_swe_trainer import load

from primerl import planning, rollout, testing

OLDEST = "1.33"  # the first with hostUsers and procMount, unless they were turned on
RECORD = '#!/bin/bash\nprintf "%s\\n" "$@" > "$WORDS"\n'  # stands for torchrun and python
RESOLVE = "#!/bin/bash\n"  # stands for getent: every name has an address


@pytest.fixture(scope="module")
def manifests(root):
    """What is applied, by kind and name."""
    text = (root / "recipes/kubernetes/glm_swe.yaml").read_text()
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def trainer(manifests):
    return manifests["Job", "trainer"]["spec"]


@pytest.fixture(scope="module")
def server(manifests):
    return manifests["StatefulSet", "server"]["spec"]


@pytest.fixture(scope="module")
def recipe(root):
    return load(root / "recipes/glm_swe.py")


@pytest.fixture
def start(manifests, tmp_path):
    """Runs a container's command in a folder that stands for the shared volume.

    Returns the words that torchrun, or python, gets.
    """
    for name, program in (("torchrun", RECORD), ("python", RECORD), ("getent", RESOLVE)):
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(stat.S_IRWXU)
    settings = {
        name: str(tmp_path) + value if value.startswith("/") else value
        for name, value in manifests["ConfigMap", "settings"]["data"].items()
    }

    def start(part, **variables):
        (container,) = part["template"]["spec"]["containers"]
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "WORDS": str(tmp_path / "words")}
        subprocess.run(
            [*container["command"], *container["args"]],
            env={**path, **settings, **variables},
            check=True,
        )
        return (tmp_path / "words").read_text().splitlines()

    start.settings = settings
    return start


@pytest.fixture
def start_trainer(start, trainer):
    """Runs the command of the trainer's pod with an index."""

    def start_trainer(*, index, **variables):
        return start(trainer, JOB_COMPLETION_INDEX=str(index), **variables)

    start_trainer.settings = start.settings
    return start_trainer


def pods(manifests):
    return [
        one["spec"]["template"]["spec"]
        for (kind, _), one in manifests.items()
        if kind in ("Job", "StatefulSet")
    ]


def test_it_fits_the_schema(manifests):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")

    for manifest in manifests.values():
        kubernetes_validate.validate(manifest, OLDEST, strict=True)


def test_the_pods_of_the_ray_cluster_fit_the_schema_and_have_room_for_actors(root):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    text = (root / "recipes/kubernetes/ray_environments.yaml").read_text()
    cluster, policy = yaml.safe_load_all(text)
    spec = cluster["spec"]
    (workers,) = spec["workerGroupSpecs"]

    kubernetes_validate.validate(policy, OLDEST, strict=True)
    for number, group in enumerate([spec["headGroupSpec"], workers]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{number}"}}
        kubernetes_validate.validate({**pod, **group["template"]}, OLDEST, strict=True)
    assert json.loads(json.loads(workers["rayStartParams"]["resources"]))["environments"] >= 1
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    assert spec["enableInTreeAutoscaling"]


def test_a_pod_of_the_ray_cluster_has_time_to_drain(root, tmp_path):
    text = (root / "recipes/kubernetes/ray_environments.yaml").read_text()
    cluster, _ = yaml.safe_load_all(text)
    pod = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    (container,) = pod["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    (tmp_path / "ray").write_text(RECORD)
    (tmp_path / "ray").chmod(stat.S_IRWXU)
    # A grep that finds a raylet once.
    (tmp_path / "grep").write_text(f"#!/bin/sh\nrmdir {tmp_path}/raylet\n")
    (tmp_path / "grep").chmod(stat.S_IRWXU)
    (tmp_path / "raylet").mkdir()
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "WORDS": str(tmp_path / "words"),
        "RAY_ADDRESS": "head:6379",
    }

    subprocess.run(command, env=environment, check=False, timeout=60, capture_output=True)

    words = (tmp_path / "words").read_text().splitlines()
    assert words[:2] == ["drain-node", "--address=head:6379"]
    assert not (tmp_path / "raylet").exists()
    left_s = int(words[words.index("--deadline-remaining-seconds") + 1])
    drain_s = inspect.signature(rollout.on_ray).parameters["drain_timeout_s"].default
    assert drain_s < left_s < pod["terminationGracePeriodSeconds"]


def test_it_fits_the_schema_with_the_settings_of_another_cluster(root):
    """Those for RDMA are commented out, because pods wait for a resource that no node has."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    text = (root / "recipes/kubernetes/glm_swe.yaml").read_text()
    text, found = re.subn(r"(?m)^( +)# (rdma/hca|NCCL_IB_\w+): ", r"\1\2: ", text)

    assert found == 4
    for manifest in yaml.safe_load_all(text):
        kubernetes_validate.validate(manifest, OLDEST, strict=True)
        if manifest["kind"] == "ConfigMap":
            assert all(isinstance(value, str) for value in manifest["data"].values())
    assert text.count("==== cluster") == 4  # the head of the file names them


def test_the_schema_finds_a_misspelt_field(trainer):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "trainer"}}

    with pytest.raises(kubernetes_validate.ValidationError, match="parallelIsm"):
        kubernetes_validate.validate(
            {**job, "spec": {**trainer, "parallelIsm": 16}}, OLDEST, strict=True
        )


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_trainer_runs_as_its_scale_says(start_trainer, trainer, server, recipe, monkeypatch):
    scale, settings = recipe.SCALES["glm5"], start_trainer.settings
    gpus = trainer["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]

    launch = launched(start_trainer(index=3))

    assert launch.node_rank == 3
    assert launch.master_addr == "trainer-0.trainer"
    assert int(launch.nnodes) == trainer["completions"] == trainer["parallelism"]
    assert int(launch.nnodes) == scale.nodes[0]
    assert int(launch.nproc_per_node) == gpus == scale.gpus_per_node
    assert launch.training_script == "recipes/glm_swe.py"
    assert recipe_arguments(recipe, launch, monkeypatch) == attrs.evolve(
        scale,
        model=settings["MODEL"],
        run_dir=settings["RUN_DIR"],
        shared_folder=settings["SHARED_FOLDER"],
        engine_urls=tuple(f"http://server-{i}.server:8000" for i in (4, 8)),
        prefill_urls=("http://server-0.server:8000",),
    )
    assert os.path.isdir(settings["SHARED_FOLDER"])


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_it_is_resumed_from_a_checkpoint_and_begun_anew_without_one(start_trainer, tmp_path):
    run_dir = start_trainer.settings["RUN_DIR"]
    checkpoints = os.path.join(run_dir, "checkpoints")
    os.makedirs(os.path.join(checkpoints, "step-00000010.partial"))
    open(os.path.join(run_dir, "args.json"), "w", encoding="utf-8").close()

    assert "--resume" not in start_trainer(index=1)
    assert os.path.isdir(run_dir)  # the first pod's to move
    assert "--resume" not in start_trainer(index=0)
    (kept,) = os.listdir(run_dir)
    assert re.fullmatch(r"before-\d+", kept)
    assert os.path.exists(os.path.join(run_dir, kept, "args.json"))

    os.makedirs(os.path.join(checkpoints, "step-00000010"))
    for index in (0, 1):
        words = start_trainer(index=index)
        assert words[-2:] == ["--resume", run_dir]
        assert os.path.isdir(run_dir)

    os.rename(os.path.join(checkpoints, "step-00000010"), os.path.join(checkpoints, "x.skipped"))
    open(os.path.join(run_dir, "args.json"), "w", encoding="utf-8").close()
    assert "--resume" not in start_trainer(index=0)  # the recipe refuses the damaged run
    assert os.path.isdir(run_dir)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_servers_are_those_of_the_scale(start, server, recipe, tmp_path, monkeypatch):
    """Pods 0 to 3 compute prompts; 4 to 7 are the second server, of which pod 4 listens."""
    (container,) = server["template"]["spec"]["containers"]
    tiny = testing.tiny_chat_model(tmp_path / "tiny", "glm4_moe", max_position_embeddings=128)
    folder = start.settings["KV_FOLDER"]
    found = {
        number: served(start(server, HOSTNAME=f"server-{number}"), monkeypatch)
        for number in (0, 3, 4, 5, 11)
    }

    scale = recipe.SCALES["glm5"]
    own = served_by_recipe(recipe, tiny, start.settings["FP8_MODEL"], monkeypatch)
    assert int(own["--data-parallel-size"]) == scale.server_gpus[0]
    for number, (model, arguments) in found.items():
        assert model == start.settings["FP8_MODEL"]
        before = number % 4
        assert arguments == own | over_nodes(
            first=f"server-{number - before}.server", start_rank=8 * before if before else None
        ) | sharing(folder, role="prefill" if number < 4 else "decode")
    pods = int(start.settings["SERVER_PODS"])
    assert pods == server["replicas"] == 28 - scale.nodes[0]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert pods * gpus == (scale.servers + scale.prefill_servers) * scale.server_gpus[0]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_first_pod_removes_what_was_stored_before(start, server):
    folder = Path(start.settings["KV_FOLDER"])
    (folder / "of an earlier run").mkdir(parents=True)
    start(server, HOSTNAME="server-1")
    assert [*folder.iterdir()]
    start(server, HOSTNAME="server-0")
    assert not [*folder.iterdir()]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_each_pod_a_server(start, start_trainer, server, recipe, tmp_path, monkeypatch):
    each = {"PODS_PER_SERVER": "1", "PREFILL_SERVERS": "0"}
    tiny = testing.tiny_chat_model(tmp_path / "tiny", "glm4_moe", max_position_embeddings=128)
    model, arguments = served(start(server, HOSTNAME="server-5", **each), monkeypatch)
    own = served_by_recipe(recipe, tiny, model, monkeypatch)
    assert arguments == own | {"--data-parallel-size": "8"}
    args = recipe_arguments(recipe, launched(start_trainer(index=0, **each)), monkeypatch)
    assert args.engine_urls == tuple(f"http://server-{i}.server:8000" for i in range(12))
    assert args.prefill_urls == ()


def test_there_is_time_to_save(trainer, recipe):
    """A rank gives up before torchrun kills it, and torchrun before Kubernetes does."""
    pod = trainer["template"]["spec"]
    killed_s = int(re.search(r"--shutdown-timeout (\d+)", pod["containers"][0]["args"][0])[1])

    assert recipe.SCALES["glm5"].grace_s + 60 < killed_s < pod["terminationGracePeriodSeconds"] - 60


UNITS = {"Gi": 2**30, "Ti": 2**40}


def quantity(text):
    return int(text[:-2]) * UNITS[text[-2:]]


def test_sizes_are_those_of_the_plan(root, manifests, trainer, server):
    """At least what the plan asks for, and at most a tenth more."""
    storage = planned_storage(root)

    def memory(pod):
        (container,) = pod["containers"]
        (shared,) = (one["emptyDir"] for one in pod["volumes"] if one["name"] == "memory")
        return quantity(container["resources"]["limits"]["memory"]), quantity(shared["sizeLimit"])

    def volume(name):
        claim = manifests["PersistentVolumeClaim", name]
        return quantity(claim["spec"]["resources"]["requests"]["storage"])

    of_servers = {name: size for name, size in storage.volume.items() if "keys and values" in name}
    of_all = {name: size for name, size in storage.volume.items() if name not in of_servers}
    assert len(of_servers) == 1
    nccl = 64 << 30
    node = storage.training_node
    in_memory = {name: size for name, size in node.items() if name.startswith("/dev/shm")}
    assert len(in_memory) == 2
    training, shared = memory(trainer["template"]["spec"])
    serving, copies = memory(server["template"]["spec"])
    for given, needed in (
        (volume("shared"), planning.asked(of_all)),
        (volume("keys-and-values"), planning.asked(of_servers)),
        (training, planning.asked(storage.training_node) + nccl),
        (shared, planning.asked(in_memory) + nccl),
        (serving, planning.asked(storage.serving_node)),
        (copies, planning.asked(storage.serving_node)),
    ):
        assert needed <= given <= 1.1 * needed


def test_requests_are_limits(manifests):
    """Pods of the class "Guaranteed" are evicted last."""
    for pod in pods(manifests):
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            resources = container["resources"]
            assert resources["requests"] == resources["limits"]
            assert {"cpu", "memory"} <= resources["limits"].keys()


def test_names_lead_somewhere(manifests, trainer, server):
    """Services and policies select pods, pods have their services, volumes and settings."""
    spaces = {
        one["metadata"].get("namespace")
        for (kind, _), one in manifests.items()
        if kind != "Namespace"
    }
    assert spaces == {"glm-swe"}
    for part, spec in {"trainer": trainer, "server": server}.items():
        assert spec["template"]["metadata"]["labels"] == {"part": part}
        assert manifests["Service", part]["spec"]["selector"] == {"part": part}
        assert manifests["Service", part]["spec"]["clusterIP"] == "None"
    assert server["selector"]["matchLabels"] == {"part": "server"}
    assert server["serviceName"] == "server"
    assert trainer["template"]["spec"]["subdomain"] == "trainer"
    for pod in pods(manifests):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["shared"]["persistentVolumeClaim"] == {"claimName": "shared"}
        assert volumes["memory"]["emptyDir"]["medium"] == "Memory"
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        sources = [
            {"configMapRef": {"name": "settings"}},
            {"configMapRef": {"name": "network"}},
            {"secretRef": {"name": "api-key"}},  # made by hand: no key is in the repository
        ]
        if container["name"] == "trainer":  # servers don't need the key of W&B
            sources.append({"secretRef": {"name": "wandb", "optional": True}})
        assert container["envFrom"] == sources
    assert ("PersistentVolumeClaim", "shared") in manifests
    assert not [name for kind, name in manifests if kind == "Secret"]


def test_only_trainers_reach_servers(manifests):
    """And the pods of a server reach each other."""
    policy = manifests["NetworkPolicy", "only-trainers-reach-servers"]["spec"]

    assert policy == {
        "podSelector": {"matchLabels": {"part": "server"}},
        "policyTypes": ["Ingress"],
        "ingress": [
            {
                "from": [{"podSelector": {"matchLabels": {"part": "trainer"}}}],
                "ports": [{"protocol": "TCP", "port": 8000}],
            },
            {"from": [{"podSelector": {"matchLabels": {"part": "server"}}}]},
        ],
    }


def test_servers_reach_trainers_only_at_the_ports_from_which_they_read_weights(manifests):
    policy = manifests["NetworkPolicy", "only-this-run-reaches-trainers"]["spec"]

    own, servers = policy["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": {"part": "trainer"}}}]}
    assert servers["from"] == [{"podSelector": {"matchLabels": {"part": "server"}}}]
    assert servers["ports"] == [{"protocol": "TCP", "port": 32768, "endPort": 60999}]


def test_pods_have_no_more_rights_than_they_need(manifests, trainer, server):
    """Sandboxes need a user namespace and no masks; nobody needs root or the cluster's own API."""
    for pod in pods(manifests):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 1000  # they share files
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            rights = {"drop": ["ALL"]} | (
                {"add": ["IPC_LOCK"]} if container in pod["containers"] else {}
            )
            assert container["securityContext"]["capabilities"] == rights
    pod = trainer["template"]["spec"]
    rights = pod["containers"][0]["securityContext"]
    assert (pod["hostUsers"], rights["procMount"]) == (False, "Unmasked")
    assert rights["seccompProfile"] == {"type": "Unconfined"}
    assert "hostUsers" not in server["template"]["spec"]
    assert server["template"]["spec"]["securityContext"]["seccompProfile"] == {
        "type": "RuntimeDefault"
    }
    (shared, *_) = server["template"]["spec"]["containers"][0]["volumeMounts"]
    assert shared["readOnly"] is True
