# The mechanics of a Slurm job whose first nodes train, by torchrun, and whose other nodes each serve
# the policy, by vLLM. The job files beside this one set TRAIN_NODES and run_dir, source it, and call
#
#   serve MODEL [flags of vLLM]      returns once every server answers, with their addresses in urls
#   train SCRIPT [its flags]         ends the job with the trainer's exit code
#
# The job fails as soon as a server ends. On SIGTERM and Ctrl-C, the trainer is told first: it saves
# after its step, for which it may need the servers.

# shellcheck shell=bash
# shellcheck disable=SC2154 # run_dir is the job file's

fail() {
    echo "${SLURM_JOB_NAME:-job}: $1" >&2
    exit 1
}

# A server's last lines say why it ended: vLLM's error, or what primerl refuses.
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

# Only those who know the key may use the servers. It travels by srun's environment, as command
# lines can be read by everyone on a node.
if [[ -z ${PRIMERL_API_KEY:-} ]]; then
    PRIMERL_API_KEY=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')
fi
export PRIMERL_API_KEY

# In the background: the same command on each node of a part, by one srun.
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
    # srun passes the signal on to its tasks; Slurm ends what is left when this script ends.
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
