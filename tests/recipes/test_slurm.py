"""The body of recipes/slurm/async_grpo.sbatch, with stand-ins for Slurm and for what it starts."""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import time

import pytest

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

STAND_INS = {
    "scontrol": 'echo "$3" | tr , "\\n"',
    # Runs the command once a node, at the same time; SIGTERM goes to all.
    "srun": """
echo "$*" >> "$STATE/sruns"
for word in "$@"; do
    case $word in
    --nodelist=*) nodes=${word#--nodelist=}; shift ;;
    --*) shift ;;
    *) break ;;
    esac
done
for node in ${nodes//,/ }; do NODE=$node "$@" & pids+=($!); done
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM
code=0
while [[ -n $(jobs -r) ]]; do
    wait -n; last=$?
    ((last == 0 || last > 128)) || { code=$last; kill -TERM "${pids[@]}" 2>/dev/null; }
done
for pid in "${pids[@]}"; do wait $pid; last=$?; ((code)) || code=$last; done
exit $code
""",
    # The server: answers after a moment, until it is told to end.
    "python": """
trap 'echo "ended $NODE" >> "$STATE/events"; exit 0' TERM
echo "server $NODE key=${PRIMERL_API_KEY:+set} $*" >> "$STATE/events"
if [[ ${SERVER_FAILS:-} == "$NODE" ]]; then
    until compgen -G "$STATE/*-answers" > /dev/null; do sleep 0.05; done  # another one serves
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
    started: list[subprocess.Popen] = []
    for name, body in STAND_INS.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(stat.S_IRWXU)

    def start(*arguments, nodes="a,b,c", **settings):
        outside = {name: value for name, value in os.environ.items() if "PRIMERL" not in name}
        process = subprocess.Popen(
            ["bash", root / "recipes/slurm/async_grpo.sbatch", *arguments],
            cwd=tmp_path,
            env={
                **outside,
                "PATH": f"{commands}:{os.environ['PATH']}",
                "STATE": str(state),
                "SLURM_JOB_NODELIST": nodes,
                "SLURM_JOB_ID": "42",
                **settings,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
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
        "key=set -m primerl.rollout.engines.vllm.server model --host 0.0.0.0 --port 8000 "
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
    deadline = time.monotonic() + 30
    while not [event for event in job.events() if event.startswith("trainer a")]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
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
