"""The jobs in recipes/slurm, with stand-ins for Slurm and for what they start."""

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time

import attrs
import pytest
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
from waiting import until

from primerl import planning, testing

JOBS = ["async_grpo.sbatch", "glm_swe.sbatch"]
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

STAND_INS = {
    "scontrol": """
case $1 in
show)
    [[ $2 == job ]] && echo "JobId=$3 JobState=${JOB_STATE:-RUNNING}" || echo "$3" | tr , "\\n" ;;
requeue) echo "requeued $2" >> "$STATE/events"; exit ${REQUEUE_CODE:-0} ;;
esac
""",
    # Runs the command once a node, at the same time; SIGTERM goes to all.
    "srun": """
echo "$*" >> "$STATE/sruns"
log=''
for word in "$@"; do
    case $word in
    --nodelist=*) nodes=${word#--nodelist=}; shift ;;
    --output=*) log=${word#--output=}; shift ;;
    --*) shift ;;
    *) break ;;
    esac
done
told=''
trap 'told=yes; kill -TERM "${pids[@]}" 2>/dev/null' TERM
for node in ${nodes//,/ }; do
    [[ -z $log ]] || exec > "${log//%N/$node}" 2>&1
    NODE=$node SLURMD_NODENAME=$node "$@" & pids+=($!)
done
[[ -z $told ]] || kill -TERM "${pids[@]}" 2>/dev/null
code=0
while [[ -n $(jobs -r) ]]; do
    wait -n; last=$?
    ((last == 0 || last > 128)) || { code=$last; kill -TERM "${pids[@]}" 2>/dev/null; }
done
# 127: "wait -n" has told the code before, and the shell no longer knows the process.
for pid in "${pids[@]}"; do wait $pid; last=$?; ((code || last == 127)) || code=$last; done
exit $code
""",
    # The server: answers after a moment, until it is told to end.
    "python": """
trap 'echo "ended $NODE" >> "$STATE/events"; exit 0' TERM
echo "server $NODE key=${PRIMERL_API_KEY:+set} $*" >> "$STATE/events"
if [[ ${SERVER_FAILS:-} == "$NODE" ]]; then
    until compgen -G "$STATE/*-answers" > /dev/null; do sleep 0.05; done  # another one serves
    echo "ValueError: what $NODE died of" >&2
    exit 5
fi
[[ ${SERVER_HANGS:-} == "$NODE" ]] || { sleep 0.2; touch "$STATE/$NODE-answers"; }
[[ ${SERVER_DIES:-} == "$NODE" ]] && { sleep 1.5; exit 6; }
while :; do sleep 0.05; done
""",
    "curl": """
url=${*: -1}; node=${url#http://}; test -e "$STATE/${node%%:*}-answers"
""",
    "torchrun": """
trap 'echo "trainer $NODE told to end" >> "$STATE/events"; exit 143' TERM
echo "trainer $NODE key=${PRIMERL_API_KEY:+set} $*" >> "$STATE/events"
[[ $* =~ --run-dir[[:space:]]([^ ]+) ]] && touch "${BASH_REMATCH[1]}/args.json"
for step in ${TRAINER_SAVES:-}; do mkdir -p "${BASH_REMATCH[1]}/checkpoints/$step"; done
for ((i = 0; i < ${TRAINER_S:-0} * 20; i++)); do sleep 0.05; done
exit ${TRAINER_CODE:-0}
""",
}


@pytest.fixture
def job(root, tmp_path):
    """Starts the job's script; ``events`` are what its parts did, in order."""
    commands, state = tmp_path / "bin", tmp_path / "state"
    commands.mkdir()
    state.mkdir()
    # As Slurm does, which runs a copy of the job's file.
    spool = tmp_path / "spool"
    spool.mkdir()
    for name in JOBS:
        shutil.copy(root / "recipes/slurm" / name, spool)
    started: list[subprocess.Popen] = []
    for name, body in STAND_INS.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(stat.S_IRWXU)

    def start(*arguments, nodes="a,b,c", script="async_grpo.sbatch", **settings):
        outside = {name: value for name, value in os.environ.items() if "PRIMERL" not in name}
        env = {
            **outside,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "STATE": str(state),
            "SLURM_JOB_NODELIST": nodes,
            "SLURM_JOB_ID": "42",
            "SLURM_SUBMIT_DIR": str(root),
            "NODES_PER_SERVER": "1",
            "PREFILL_SERVERS": "0",
            **settings,
        }
        process = subprocess.Popen(
            ["bash", spool / script, *arguments],
            cwd=tmp_path,
            env={name: value for name, value in env.items() if value is not None},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,
        )
        started.append(process)
        return process

    def events(name="events"):
        return (state / name).read_text().splitlines() if (state / name).exists() else []

    start.events = events
    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def run(job, *arguments, **settings):
    process = job(*arguments, **settings)
    out, errors = process.communicate(timeout=60)
    return process.returncode, out, errors


def test_the_first_nodes_train_and_the_others_serve(job, tmp_path):
    code, out, errors = run(
        job,
        "model",
        "run",
        "--steps",
        "3",
        nodes="a,b,c,d",
        TRAIN_NODES="2",
        GPUS_PER_NODE="4",
        SERVER_FLAGS="--tensor-parallel-size 4 --max-model-len 512",
    )

    assert code == 0, errors
    assert out == "serving: http://c:8000 http://d:8000\n"
    events = job.events()
    server = (
        "key=set -m primerl.serving.server model --host 0.0.0.0 --port 8000 "
        "--start-timeout-s 1800 --tensor-parallel-size 4 --max-model-len 512"
    )
    assert sorted(events[:2]) == [f"server c {server}", f"server d {server}"]
    trainer = (
        "key=set --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint a:29500 "
        "--rdzv-id 42 recipes/async_grpo.py --model model --run-dir run "
        "--weights-folder run/weights --engine vllm "
        "--engine-urls http://c:8000 http://d:8000 --steps 3"
    )
    assert sorted(events[2:4]) == [f"trainer a {trainer}", f"trainer b {trainer}"]
    assert sorted(events[4:]) == ["ended c", "ended d"]  # once the trainer had ended
    assert [line.split(" --kill")[0] for line in job.events("sruns")] == [
        "--nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=c,d",
        "--nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=a,b",
    ]
    assert (tmp_path / "run" / "logs").is_dir()


def test_the_key_is_random_and_on_no_command_line(job, tmp_path):
    (tmp_path / "bin" / "torchrun").write_text(
        '#!/bin/bash\necho "$PRIMERL_API_KEY" > $STATE/key\n'
    )
    keys = set()
    for _ in range(2):
        assert run(job, "model", "run")[0] == 0
        keys |= {*job.events("key")}

    assert len(keys) == 2
    assert all(len(key) == 64 for key in keys)
    written = "\n".join(job.events() + job.events("sruns"))
    assert not [key for key in keys if key in written]
    run(job, "model", "run", PRIMERL_API_KEY="of-the-user")
    assert job.events("key") == ["of-the-user"]


def test_the_trainers_exit_code_is_the_jobs(job):
    code, _, _ = run(job, "model", "run", TRAINER_CODE="3")

    assert code == 3
    assert {"ended b", "ended c"} <= set(job.events())


def test_a_server_that_ends_while_starting_fails_the_job(job):
    code, _, errors = run(job, "model", "run", SERVER_FAILS="c", START_TIMEOUT_S="30")

    assert code == 1
    assert "a server ended while starting" in errors
    assert "ValueError: what c died of" in errors
    assert "ended b" in job.events()
    assert not [event for event in job.events() if event.startswith("trainer")]


def test_a_server_that_does_not_answer_fails_the_job_at_the_deadline(job):
    started = time.monotonic()
    code, _, errors = run(job, "model", "run", SERVER_HANGS="c", START_TIMEOUT_S="2")

    assert code == 1
    assert time.monotonic() - started < 20
    assert "http://c:8000 does not answer" in errors
    assert {"ended b", "ended c"} <= set(job.events())


def test_a_server_that_dies_fails_the_job_and_ends_the_trainer(job):
    code, _, errors = run(job, "model", "run", SERVER_DIES="b", TRAINER_S="30")

    assert code == 1
    assert "a server ended before the trainer" in errors
    assert {"trainer a told to end", "ended c"} <= set(job.events())


def test_a_job_that_is_cancelled_ends_its_parts(job):
    process = job("model", "run", TRAINER_S="30")
    until(lambda: trainers(job))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)

    assert process.returncode == 143
    assert {"trainer a told to end", "ended b", "ended c"} <= set(job.events())


def test_what_is_missing_is_said(job):
    code, _, errors = run(job, "model")
    assert (code, "expected MODEL RUN_DIR" in errors) == (1, True)
    code, _, errors = run(job, "model", "run", nodes="a")
    assert (code, "none is left to serve" in errors) == (1, True)
    assert job.events() == []


def trainers(job):
    return [event for event in job.events() if event.startswith("trainer a key")]


FORTY = "step-00000040"
ENDS = {
    "scontrol requeue": [signal.SIGTERM, signal.SIGKILL],
    "a preemption with a long grace time": [signal.SIGTERM],
    "the failure of a node": [signal.SIGKILL],
}


@pytest.mark.parametrize("script", JOBS)
@pytest.mark.parametrize("event", ENDS)
def test_a_requeued_job_goes_on_from_its_last_checkpoint(job, tmp_path, script, event):
    arguments = ["model", *(["model-fp8"] if script.startswith("glm") else []), "run"]
    settings = {"script": script, "TRAIN_NODES": "1"}
    process = job(*arguments, **settings, TRAINER_S="30", TRAINER_SAVES=f"step-00000030 {FORTY}")
    until(lambda: (tmp_path / "run/checkpoints" / FORTY).exists())
    for sent in ENDS[event]:
        os.killpg(process.pid, sent)
        if sent is not ENDS[event][-1]:
            time.sleep(0.2)
    process.communicate(timeout=30)
    assert process.returncode != 0

    code, out, errors = run(job, *arguments, **settings, SLURM_RESTART_COUNT="1")

    assert code == 0, errors
    assert f"start 2 of this job: resuming from {FORTY}" in out
    first, second = trainers(job)
    assert "--resume" not in first
    assert second.endswith("--resume run")


@pytest.mark.thorough
def test_a_requeued_job_takes_the_steps_after_its_last_checkpoint(root, job, tmp_path):
    """A real run in place of torchrun: steps 0 to 2, a checkpoint after two, and a requeue."""
    words = f'exec {sys.executable} {root}/tests/ranks/requeued_run.py "$@"'
    (tmp_path / "bin/torchrun").write_text(f"#!/bin/bash\n{words}\n")
    steps = tmp_path / "run/steps"
    process = job("model", "run", PYTHONPATH=str(root))
    until(lambda: steps.exists() and steps.read_text() == "0\n1\n2\n")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)

    code, out, errors = run(job, "model", "run", PYTHONPATH=str(root), SLURM_RESTART_COUNT="1")

    assert code == 0, errors
    assert "trained 6 steps, bias 6" in out
    assert steps.read_text().split() == ["0", "1", "2", "2", "3", "4", "5"]


def test_a_job_that_is_requeued_before_its_first_checkpoint_begins_anew(job, tmp_path):
    (tmp_path / "run/checkpoints" / f"{FORTY}.partial").mkdir(parents=True)
    assert run(job, "model", "run", SLURM_RESTART_COUNT="1")[0] == 0  # the trainer never began
    assert not list(tmp_path.glob("run/before-*"))

    code, out, errors = run(job, "model", "run/", SLURM_RESTART_COUNT="2")

    assert code == 0, errors
    (aside,) = tmp_path.glob("run/before-*")
    assert (
        f"there was no checkpoint, so the run begins anew; its files are in run/{aside.name}" in out
    )
    assert (aside / "args.json").exists()
    assert not [event for event in trainers(job) if "--resume" in event]


@pytest.mark.parametrize("name", ["lr[1e-5]", "what?", "a\\b", "two words", "*"])
def test_a_run_with_checkpoints_is_resumed_whatever_its_folder_is_called(job, tmp_path, name):
    (tmp_path / name / "checkpoints" / FORTY).mkdir(parents=True)
    (tmp_path / name / "args.json").touch()
    code, _, errors = run(job, "model", name, SLURM_RESTART_COUNT="1")
    assert code == 0, errors
    assert (tmp_path / name / "checkpoints" / FORTY).exists()
    assert all(f"--resume {name}" in event for event in trainers(job))


def test_a_run_folder_that_is_a_link_stays_one_when_the_run_begins_anew(job, tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch/args.json").touch()
    (tmp_path / "run").symlink_to("scratch")
    code, _, errors = run(job, "model", "run", SLURM_RESTART_COUNT="1")
    assert code == 0, errors
    assert (tmp_path / "run").is_symlink()
    (aside,) = (tmp_path / "scratch").glob("before-*")
    assert (aside / "args.json").exists()


def test_a_percent_sign_in_the_run_folder_is_refused(job):
    code, _, errors = run(job, "model", "run-%j")
    assert code == 1
    assert "RUN_DIR is run-%j; srun would replace the %" in errors


def test_the_flags_decide_in_a_job_that_is_submitted(job, tmp_path):
    (tmp_path / "run/checkpoints" / FORTY).mkdir(parents=True)
    run(job, "model", "run", SLURM_RESTART_COUNT="0")
    run(job, "model", "run", "--resume", "run")
    assert ["--resume" in event for event in trainers(job)] == [False, True]

    code, _, errors = run(job, "model", "run", "--run-dir=other")
    assert (code, "RUN_DIR is an argument of the job" in errors) == (1, True)
    assert len(trainers(job)) == 2


def test_a_run_whose_checkpoints_are_damaged_does_not_begin_anew(job, tmp_path):
    (tmp_path / "run/checkpoints" / f"{FORTY}.skipped").mkdir(parents=True)
    (tmp_path / "run/args.json").touch()

    code, _, errors = run(job, "model", "run", SLURM_RESTART_COUNT="1")

    assert code == 1
    assert "all checkpoints in run/checkpoints are damaged" in errors
    assert not job.events()


def test_a_job_that_fails_is_requeued_until_it_fails_without_a_new_checkpoint(job):
    """An error that comes back ends the job; one that does not is survived."""
    failing = {"TRAINER_CODE": "3"}

    code, _, errors = run(job, "model", "run", **failing, TRAINER_SAVES=FORTY)
    assert (code, f"requeued, to resume from {FORTY}" in errors) == (3, True)
    assert job.events().count("requeued 42") == 1

    code, _, errors = run(job, "model", "run", **failing, SLURM_RESTART_COUNT="1")
    assert (code, "not restarted: no checkpoint was saved since" in errors) == (3, True)
    assert job.events().count("requeued 42") == 1
    assert {"ended b", "ended c"} <= set(job.events())


def test_a_checkpoint_that_is_saved_anew_under_its_old_name_is_a_new_one(job, tmp_path):
    saved = tmp_path / "run/checkpoints" / FORTY
    saved.mkdir(parents=True)
    torchrun = tmp_path / "bin/torchrun"
    fails = "#!/bin/bash\nexit 3\n"
    torchrun.write_text(fails)
    code, _, errors = run(job, "model", "run", SLURM_RESTART_COUNT="1")
    assert (code, "not restarted: no checkpoint was saved since" in errors) == (3, True)

    anew = f"mkdir {saved}.partial && rm -r {saved} && mv {saved}.partial {saved}"
    torchrun.write_text(fails.replace("exit", f"{anew}\nexit"))
    code, _, errors = run(job, "model", "run", SLURM_RESTART_COUNT="1")
    assert (code, f"requeued, to resume from {FORTY}" in errors) == (3, True)
    assert job.events().count("requeued 42") == 1


def test_a_server_that_dies_is_survived_if_there_is_a_new_checkpoint(job):
    code, _, errors = run(job, "model", "run", SERVER_DIES="b", TRAINER_S="30", TRAINER_SAVES=FORTY)

    assert code == 1
    assert "a server ended before the trainer" in errors
    events = job.events()
    assert events.index("ended c") < events.index("requeued 42")


def test_jobs_that_are_done_or_stopped_are_not_requeued(job):
    for code, state in (("0", "RUNNING"), ("143", "RUNNING"), ("1", "CANCELLED")):
        settings = {"TRAINER_CODE": code, "TRAINER_SAVES": FORTY, "JOB_STATE": state}
        assert run(job, "model", f"run-{code}", **settings)[0] == int(code)
    assert "requeued 42" not in job.events()


def test_a_cluster_that_requeues_no_jobs_is_reported(job):
    failing = {"TRAINER_CODE": "3", "TRAINER_SAVES": FORTY}

    code, _, errors = run(job, "model", "run", **failing, REQUEUE_CODE="1")

    assert (code, "submit the job with --resume run" in errors) == (3, True)


def test_network_settings_reach_ranks_and_servers(root, job, tmp_path):
    """The settings that are commented out are right as they stand."""
    shared = root / "recipes/slurm/trainer_and_servers.sh"
    text, found = re.subn(r"(?m)^#(export NCCL|export GLOO)", r"\1", shared.read_text())
    assert found == 4
    (tmp_path / "spool" / shared.name).write_text(text)
    for name in ("torchrun", "python"):
        path = tmp_path / "bin" / name
        record = "env | grep -E '^(NCCL|GLOO)' | sort > $STATE/network-$NODE"
        path.write_text(path.read_text().replace("#!/bin/bash", f"#!/bin/bash\n{record}"))

    assert run(job, "model", "run", NCCL_IB_GID_INDEX="5")[0] == 0

    assert (
        job.events("network-a")
        == job.events("network-b")
        == [
            "GLOO_SOCKET_IFNAME=eth0",
            "NCCL_IB_GID_INDEX=5",
            "NCCL_IB_HCA==mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7",
            "NCCL_SOCKET_IFNAME==eth0",
        ]
    )


# ---- the job of glm_swe.py ----


@pytest.fixture(scope="module")
def recipe(root):
    return load(root / "recipes/glm_swe.py")


def test_glm_swe_runs_as_its_scale_says(root, job, recipe, tmp_path, monkeypatch):
    scale = recipe.SCALES["glm5"]
    trainers = [f"t{number:02}" for number in range(scale.nodes[0])]
    servers = [f"x{number:02}" for number in range(12)]
    models = [tmp_path / "glm", tmp_path / "glm-fp8"]

    code, out, errors = run(
        job,
        *[*models, "run", "--steps", "500", "--resume", "run"],
        script="glm_swe.sbatch",
        nodes=",".join([*trainers, *servers]),
        NODES_PER_SERVER=None,  # the job's own
        PREFILL_SERVERS=None,
    )

    assert code == 0, errors
    sampling = ("http://x04:8000", "http://x08:8000")
    assert out == f"serving: {' '.join(sampling)}, computing prompts: http://x00:8000\n"
    words = {event.split()[1]: event.split()[3:] for event in job.events() if "key=set" in event}
    assert words.keys() == {*trainers, *servers}

    launch = launched(words["t00"])
    assert all(words[trainer] == words["t00"] for trainer in trainers)
    assert (int(launch.nnodes), int(launch.nproc_per_node)) == (scale.nodes[0], scale.gpus_per_node)
    assert launch.rdzv_endpoint == "t00:29500"
    assert launch.training_script == "recipes/glm_swe.py"
    begun = json.dumps(attrs.asdict(scale))
    (tmp_path / "run" / "args.json").write_text(begun)
    monkeypatch.chdir(tmp_path)
    assert recipe_arguments(recipe, launch, monkeypatch) == attrs.evolve(
        scale,
        model=str(models[0]),
        steps=500,
        run_dir="run",
        resume="run",
        shared_folder="run/shared",
        engine_urls=sampling,
        prefill_urls=("http://x00:8000",),
    )
    assert (tmp_path / "run/shared").is_dir()
    assert not (tmp_path / "run/shared/keys-and-values").exists()  # it was, until the servers ended

    tiny = testing.tiny_chat_model(tmp_path / "tiny", "glm4_moe", max_position_embeddings=128)
    own = served_by_recipe(recipe, tiny, str(models[1]), monkeypatch)
    assert int(own["--data-parallel-size"]) == scale.server_gpus[0]
    for number, server in enumerate(servers):
        model, arguments = served(words[server], monkeypatch)
        assert model == str(models[1])
        role = "prefill" if number < 4 else "decode"
        before = number % 4
        start_rank = 8 * before if before else None
        assert arguments == own | over_nodes(
            first=servers[number - before], start_rank=start_rank
        ) | sharing(tmp_path / "run/shared/keys-and-values", role=role)


def test_servers_of_glm_swe_over_several_nodes(job, recipe, tmp_path, monkeypatch):
    """The first node of each server listens, and the others join it with the ranks after its."""
    serving = {"script": "glm_swe.sbatch", "NODES_PER_SERVER": "2", "TRAIN_NODES": "1"}
    started = ["model", "fp8-model", "run"]

    code, out, errors = run(job, *started, nodes="t,s1,s2,s3,s4", **serving)

    assert code == 0, errors
    assert out == "serving: http://s1:8000 http://s3:8000\n"
    (trainer,) = (event for event in job.events() if event.startswith("trainer"))
    assert "--engine-urls http://s1:8000 http://s3:8000" in trainer
    words = {event.split()[1]: event.split()[3:] for event in job.events() if "server" in event}
    words = {node: served(words[node], monkeypatch) for node in ("s1", "s2", "s3", "s4")}
    tiny = testing.tiny_chat_model(tmp_path / "tiny", "glm4_moe", max_position_embeddings=128)
    own = served_by_recipe(recipe, tiny, "fp8-model", monkeypatch)
    own["--data-parallel-size"] = "16"
    for first, further in (("s1", "s2"), ("s3", "s4")):
        assert words[first] == ["fp8-model", own | over_nodes(first=first)]
        assert words[further] == ["fp8-model", own | over_nodes(first=first, start_rank=8)]

    code, _, errors = run(job, *started, nodes="t,s1,s2,s3", **serving)
    assert (code, "3 nodes serve, expected a multiple of NODES_PER_SERVER=2" in errors) == (1, True)

    serving["PREFILL_SERVERS"] = "2"
    code, _, errors = run(job, *started, nodes="t,s1,s2,s3,s4", **serving)
    assert (code, "4 of 4 serving nodes are for PREFILL_SERVERS" in errors) == (1, True)


def test_a_node_of_a_server_that_ends_fails_the_job(job):
    settings = {"script": "glm_swe.sbatch", "NODES_PER_SERVER": "2", "TRAIN_NODES": "1"}
    started = ["model", "fp8-model", "run"]

    code, _, errors = run(
        job, *started, nodes="t,s1,s2", SERVER_DIES="s2", TRAINER_S="30", **settings
    )

    assert code == 1
    assert "a server ended before the trainer" in errors


def test_glm_swe_has_time_to_save(root, recipe):
    """A rank gives up before torchrun kills it, and torchrun before Slurm does."""
    text = (root / "recipes/slurm/glm_swe.sbatch").read_text()
    nodes = int(re.search(r"^#SBATCH --nodes=(\d+)", text, re.MULTILINE)[1])
    warned_s = int(re.search(r"^#SBATCH --signal=B:TERM@(\d+)", text, re.MULTILINE)[1])
    killed_s = int(re.search(r"^SHUTDOWN_TIMEOUT_S=(\d+)", text, re.MULTILINE)[1])

    assert recipe.SCALES["glm5"].grace_s + 60 < killed_s < warned_s - 60
    assert nodes == 28


def test_glm_swe_says_how_much_room_it_takes(root):
    text = (root / "recipes/slurm/glm_swe.sbatch").read_text()
    said = [float(size) for size in re.findall(r"(?m)^# +([\d.]+) TB ", text)]
    text += (root / "docs/clusters.md").read_text()
    limits = [int(size) for size in re.findall(r"remount,size=(\d+)G /dev/shm", text)]

    storage = planned_storage(root)

    needed = [planning.asked(one) / 1e12 for one in storage.places.values()]
    assert said == [pytest.approx(one, abs=0.1) for one in needed]
    memory = planning.asked(storage.serving_node)
    assert len(limits) == 2
    assert all(memory <= limit << 30 <= 1.1 * memory for limit in limits)


def test_glm_swes_shutdown_timeout_reaches_torchrun(job):
    nodes = {"nodes": "a,b", "TRAIN_NODES": "1"}
    run(job, "model", "fp8-model", "run", script="glm_swe.sbatch", **nodes)
    run(job, "model", "run", **nodes)

    trainers = [event for event in job.events() if event.startswith("trainer")]
    assert ["--shutdown-timeout 1080" in event for event in trainers] == [True, False]


def test_servers_of_glm_swe_take_further_flags_and_refuse_a_split_prefill(job, monkeypatch):
    offload = '{"kv_connector":"OffloadingConnector","kv_role":"kv_both"}'
    flags = f"--kv-transfer-config={offload}"
    started = ["model", "fp8-model", "run"]
    places = {"nodes": "a,b", "TRAIN_NODES": "1"}
    run(job, *started, script="glm_swe.sbatch", SERVER_FLAGS=flags, **places)
    (words,) = (event.split()[3:] for event in job.events() if event.startswith("server"))

    _, arguments = served(words, monkeypatch)
    assert arguments["--kv-transfer-config"] == offload
    split = [word.replace("OffloadingConnector", "NixlConnector") for word in words]
    with pytest.raises(ValueError, match="expert routes of a prefill"):
        served(split, monkeypatch)


def test_what_glm_swe_lacks_is_said(job):
    code, _, errors = run(job, "model", "run", script="glm_swe.sbatch")
    assert (code, "expected MODEL FP8_MODEL RUN_DIR" in errors) == (1, True)


RAY = r"""
if [[ $1 == status ]]; then [[ -e "$STATE/up" ]]; exit; fi
echo "$SLURMD_NODENAME" "$@" >> "$STATE/events"
case "$*" in
    *--head*) [[ -n ${RAY_AUTH_TOKEN_PATH:-} ]] && touch "$STATE/up"; sleep 2 ;;
    *) sleep 60 ;;
esac
"""
SRUN = r"""
for word; do case $word in --nodelist=*) nodes=${word#--nodelist=} ;; esac; done
while [[ $1 != ray ]]; do shift; done
for node in ${nodes//,/ }; do SLURMD_NODENAME=$node "$@" & done
wait
"""


def test_nodes_of_a_ray_cluster_join_its_head(root, tmp_path):
    for name, body in {"ray": RAY, "srun": SRUN, "scontrol": 'tr "," "\\n" <<< "$3"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    folder = tmp_path / "shared"
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "STATE": str(tmp_path)}
    with subprocess.Popen(
        ["bash", root / "recipes/slurm/ray_environments.sbatch", folder],
        env={**os.environ, **variables, "SLURM_JOB_NODELIST": "a,b,c"},
        start_new_session=True,
    ) as job:
        assert job.wait(60) == 0  # when the head has ended
        os.killpg(job.pid, signal.SIGKILL)

    room = '--resources={"environments": 4}'
    assert sorted((tmp_path / "events").read_text().splitlines()) == [
        f"a start --block {room} --head --port=6379 --include-dashboard=false",
        f"b start --block {room} --address=a:6379",
        f"c start --block {room} --address=a:6379",
    ]
    assert stat.S_IMODE((folder / "ray-token").stat().st_mode) == 0o600
    assert not (folder / "ray-address").exists()


@pytest.mark.parametrize("name", [*JOBS, "trainer_and_servers.sh", "ray_environments.sbatch"])
def test_the_shell_finds_nothing_to_say(root, name):
    path = root / "recipes/slurm" / name
    subprocess.run(["bash", "-n", path], check=True)
    shellcheck = shutil.which(
        "shellcheck", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    )
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (make test does)")
    done = subprocess.run(
        [shellcheck, "-x", path], capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stdout
