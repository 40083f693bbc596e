# Shell functions for a Slurm job whose first nodes train, with torchrun, and whose other nodes each
# run a vLLM server of the policy. The job files in this folder set TRAIN_NODES and run_dir, source
# this file, and call
#
#   serve MODEL [flags of vLLM]      start the servers, wait until all answer, and set urls
#   train SCRIPT [its flags]         run the trainer, and end the job with its exit code
#
# The job fails as soon as a server ends. On SIGTERM and Ctrl-C, the trainer is stopped first: it
# saves a checkpoint after its step, and may need the servers to finish the step.

# shellcheck shell=bash
# shellcheck disable=SC2154 # the job file sets run_dir

fail() {
    echo "${SLURM_JOB_NAME:-job}: $1" >&2
    exit 1
}

# The last lines of a server's log say why it ended: an error of vLLM, or a refusal of primerl.
fail_for_servers() {
    tail --quiet --lines=4 "$run_dir"/logs/server-*.log >&2 2>/dev/null || true
    fail "$1: $run_dir/logs"
}

train_nodes=${TRAIN_NODES:-1}
port=${SERVER_PORT:-8000}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
((${#nodes[@]} > train_nodes)) ||
    fail "${#nodes[@]} node(s), of which $train_nodes train: none is left to serve; sbatch --nodes N"
trainers=("${nodes[@]:0:train_nodes}")
servers=("${nodes[@]:train_nodes}")
urls=()
for node in "${servers[@]}"; do urls+=("http://$node:$port"); done
mkdir -p "$run_dir/logs"

# The servers accept only requests with this key. srun passes it through the environment, since
# every user of a node can read command lines.
if [[ -z ${PRIMERL_API_KEY:-} ]]; then
    PRIMERL_API_KEY=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')
fi
export PRIMERL_API_KEY

# on PART COMMAND: run the command on each node of a part (trainers or servers). Call it with &.
on() {
    local -n part=$1
    shift
    exec srun --nodes="${#part[@]}" --ntasks="${#part[@]}" --ntasks-per-node=1 \
        --nodelist="$(IFS=,; echo "${part[*]}")" --kill-on-bad-exit=1 "$@"
}

serving='' training=''
finish() {
    local code=$?
    trap - EXIT TERM INT
    # srun forwards the signal to its tasks. Slurm kills remaining processes when this script ends.
    for part in $training $serving; do
        kill -TERM "$part" 2>/dev/null || true
        wait "$part" || true
    done
    exit "$code"
}
trap finish EXIT
trap 'exit 143' TERM INT

serve() {
    local model=$1 url deadline
    shift
    on servers --output="$run_dir/logs/server-%N.log" \
        python -m primerl.serving.server "$model" --host 0.0.0.0 --port "$port" \
        --start-timeout-s "${START_TIMEOUT_S:-1800}" "$@" &
    serving=$!

    deadline=$((SECONDS + ${START_TIMEOUT_S:-1800}))
    for url in "${urls[@]}"; do
        until curl --silent --fail --noproxy '*' --max-time 5 --output /dev/null "$url/health"; do
            kill -0 "$serving" 2>/dev/null || fail_for_servers "a server ended while starting"
            ((SECONDS < deadline)) || fail_for_servers "$url does not answer"
            sleep 1
        done
    done
    echo "serving: ${urls[*]}"
}

train() {
    local code=0
    on trainers torchrun --nnodes "$train_nodes" --nproc-per-node "${GPUS_PER_NODE:-8}" \
        --rdzv-backend c10d --rdzv-endpoint "${trainers[0]}:${TRAIN_PORT:-29500}" \
        --rdzv-id "$SLURM_JOB_ID" ${SHUTDOWN_TIMEOUT_S:+--shutdown-timeout "$SHUTDOWN_TIMEOUT_S"} \
        "$@" &
    training=$!

    wait -n "$training" "$serving" || true
    if kill -0 "$training" 2>/dev/null; then
        fail_for_servers "a server ended before the trainer"
    fi
    wait "$training" || code=$?
    exit "$code"
}
