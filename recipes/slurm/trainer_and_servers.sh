# Shell functions for a Slurm job whose first nodes train, with torchrun, and whose other nodes each
# run a vLLM server of the policy, or NODES_PER_SERVER of them together. The first PREFILL_SERVERS
# servers compute prompts for the others, by keys and values in the folder kv_folder. The job files in
# this folder set TRAIN_NODES and run_dir, source this file, and call
#
#   serve MODEL [flags of vLLM]      start the servers, and wait until all answer
#   train SCRIPT [its flags]         run the trainer, and end the job with its exit code
#
# The array urls has the urls of the servers that sample, and prefill_urls those of the others.
#
# The job fails as soon as a server ends. On SIGTERM and Ctrl-C, the trainer is stopped first: it
# saves a checkpoint after its step, and may need the servers to finish the step.
#
# A job that Slurm has requeued (after the failure of a node, a preemption or `scontrol requeue`)
# resumes the run: the trainer gets `--resume`. A run that ended before its first checkpoint is moved
# aside, and begins anew. A job whose trainer or server fails requeues itself, but only if the run
# has saved a checkpoint since the job was started. So an error that comes back ends the job.

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

# ==== cluster: network and limits =================================================================
# srun passes all of this on to the ranks and to the vLLM servers, whose GPUs also use NCCL and Gloo.
# Variables that are already set win. As they are, the settings suit nodes without InfiniBand, too.
# With NCCL_DEBUG=INFO, NCCL says what it takes: "NET/IB" (InfiniBand or RoCE) or "NET/Socket" (TCP).
#
# The interface over which ranks find each other, and Gloo sends. `ip -br addr` lists interfaces:
# take one that is up on all nodes and reaches the others. By default, NCCL takes the first one,
# preferably named ib*, and Gloo that of the host's name, which on some clusters is loopback.
# NCCL takes a prefix, or an exact name after "="; Gloo takes exact names.
#export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-=eth0}"
#export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-eth0}"
#
# The RDMA adapters of the GPUs, without those for storage. `ibdev2netdev` or `ibv_devinfo -l` lists
# them. A prefix, or exact names after "=". By default, NCCL takes all that are up.
#export NCCL_IB_HCA="${NCCL_IB_HCA:-=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7}"
#
# Only for RoCE: the entry of an adapter's address table with RoCE v2 and the node's IP address, as
# `show_gids` lists it. NCCL 2.21 and later find it themselves.
#export NCCL_IB_GID_INDEX="${NCCL_IB_GID_INDEX:-3}"
#
# RDMA pins memory (memlock), and each connection takes a file descriptor. These soft limits rise to
# the hard ones. The job files have `--propagate=NONE`: the hard limits are those of the nodes'
# slurmd (LimitMEMLOCK=infinity in its unit), not those of the shell that submitted the job. NCCL
# and published weights use /dev/shm, which by default may take half of a node's memory.
ulimit -S -l "$(ulimit -H -l)"
ulimit -S -n "$(ulimit -H -n)"
if compgen -G '/sys/class/infiniband/*' > /dev/null && [[ $(ulimit -l) != unlimited ]]; then
    echo "${SLURM_JOB_NAME:-job}: a process may pin only $(ulimit -l) KB (ulimit -l), so NCCL can't" \
        "use RDMA; set LimitMEMLOCK=infinity in the slurmd unit of the nodes" >&2
fi
# ==================================================================================================

train_nodes=${TRAIN_NODES:-1}
port=${SERVER_PORT:-8000}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
((${#nodes[@]} > train_nodes)) ||
    fail "${#nodes[@]} node(s), of which $train_nodes train: none is left to serve; sbatch --nodes N"
trainers=("${nodes[@]:0:train_nodes}")
servers=("${nodes[@]:train_nodes}")
nodes_per_server=${NODES_PER_SERVER:-1}
((${#servers[@]} % nodes_per_server == 0)) ||
    fail "${#servers[@]} nodes serve, expected a multiple of NODES_PER_SERVER=$nodes_per_server"
prefill_nodes=$((${PREFILL_SERVERS:-0} * nodes_per_server))
((prefill_nodes < ${#servers[@]})) ||
    fail "$prefill_nodes of ${#servers[@]} serving nodes are for PREFILL_SERVERS: none is left to sample"
urls=() prefill_urls=()
for ((i = 0; i < ${#servers[@]}; i += nodes_per_server)); do
    if ((i < prefill_nodes)); then
        prefill_urls+=("http://${servers[i]}:$port")
    else
        urls+=("http://${servers[i]}:$port")
    fi
done

# The run's last complete checkpoint, or nothing. (compgen -G would read the folder as a pattern.)
last_checkpoint() {
    local found
    found=("$run_dir"/checkpoints/step-????????)
    [[ ! -d ${found[-1]} ]] || echo "${found[-1]}"
}

# The inode tells whether a checkpoint was saved again under its old name.
inode() { [[ -z $1 ]] || stat --format=%i "$1"; }

for flag in "$@"; do
    [[ $flag != --run[-_]dir* ]] || fail "$flag: RUN_DIR is an argument of the job, not a flag"
done
[[ $run_dir != *%* ]] || fail "RUN_DIR is $run_dir; srun would replace the % in names of logs"
run_dir=${run_dir%/}
begun_from=$(last_checkpoint)
begun_inode=$(inode "$begun_from")
damaged=("$run_dir"/checkpoints/step-*.skipped)
resume=()
if ((${SLURM_RESTART_COUNT:-0} > 0)); then
    if [[ -n $begun_from ]]; then
        resume=(--resume "$run_dir")
        echo "start $((SLURM_RESTART_COUNT + 1)) of this job: resuming from ${begun_from##*/}"
    elif [[ -e ${damaged[0]} ]]; then
        fail "all checkpoints in $run_dir/checkpoints are damaged, so the run can't be resumed"
    elif [[ -e $run_dir/args.json ]]; then
        # The folder itself stays, because it may be a link or a mount point.
        aside=$run_dir/before-$EPOCHSECONDS
        mkdir "$aside"
        find "$run_dir/" -mindepth 1 -maxdepth 1 ! -name 'before-*' -exec mv -t "$aside" {} +
        echo "start $((SLURM_RESTART_COUNT + 1)) of this job: there was no checkpoint, so the run" \
            "begins anew; its files are in $aside"
    fi
fi
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
        --nodelist="$(IFS=,; echo "${part[*]}")" --kill-on-bad-exit=1 --cpu-bind=none "$@"
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
    ((prefill_nodes == 0)) || rm -rf "$kv_folder"
    ((code == 0 || code == 143)) || restart # 143: told to stop
    exit "$code"
}

# Requeue this job, which has failed, if that leads further than the last time.
restart() {
    local saved
    saved=$(last_checkpoint)
    # Requeueing a job that was cancelled would bring it back.
    [[ $(scontrol show job "$SLURM_JOB_ID") == *JobState=RUNNING* ]] || return 0
    if [[ -z $training || -z $saved || $(inode "$saved") == "$begun_inode" ]]; then
        echo "not restarted: no checkpoint was saved since this job was started" >&2
    elif scontrol requeue "$SLURM_JOB_ID"; then
        echo "requeued, to resume from ${saved##*/}" >&2
    else
        echo "not restarted: Slurm refuses to requeue; submit the job with --resume $run_dir" >&2
    fi
}
trap finish EXIT
trap 'exit 143' TERM INT

# Runs a command with the flags of this node's part of a server: the first of its nodes listens, and
# the others join it. Arguments: nodes per server, ranks per node, the number of nodes that compute
# prompts, the folder of keys and values, all serving nodes, "--", command.
# shellcheck disable=SC2016 # it is expanded on the nodes
part_of_server='
    per_server=$1 ranks=$2 prefill_nodes=$3 kv_folder=$4 nodes=() flags=()
    shift 4
    while [[ $1 != -- ]]; do nodes+=("$1"); shift; done
    shift
    for ((i = 0; i < ${#nodes[@]}; i++)); do [[ ${nodes[i]} != "$SLURMD_NODENAME" ]] || break; done
    if ((prefill_nodes > 0)); then
        ((i < prefill_nodes)) && role=prefill || role=decode
        flags+=(--kv-folder "$kv_folder" --kv-role "$role")
    fi
    before=$((i % per_server))
    if ((per_server > 1)); then
        flags+=(--data-parallel-size-local "$ranks" --data-parallel-address "${nodes[i - before]}")
    fi
    ((before == 0)) || flags+=(--headless --data-parallel-start-rank $((before * ranks)))
    exec "$@" "${flags[@]}"
'

serve() {
    local model=$1 url deadline part=()
    shift
    if ((nodes_per_server > 1 || prefill_nodes > 0)); then
        part=(bash -c "$part_of_server" part "$nodes_per_server" "${GPUS_PER_NODE:-8}")
        part+=("$prefill_nodes" "${kv_folder:-}" "${servers[@]}" --)
    fi
    if ((prefill_nodes > 0)); then
        rm -rf "$kv_folder" # of an earlier start, which was killed
        mkdir -p "$kv_folder"
    fi
    on servers --output="$run_dir/logs/server-%N.log" "${part[@]}" \
        python -m primerl.serving.server "$model" --host 0.0.0.0 --port "$port" \
        --start-timeout-s "${START_TIMEOUT_S:-1800}" "$@" &
    serving=$!

    deadline=$((SECONDS + ${START_TIMEOUT_S:-1800}))
    for url in "${prefill_urls[@]}" "${urls[@]}"; do
        until curl --silent --fail --noproxy '*' --max-time 5 --output /dev/null "$url/health"; do
            kill -0 "$serving" 2>/dev/null || fail_for_servers "a server ended while starting"
            ((SECONDS < deadline)) || fail_for_servers "$url does not answer"
            sleep 1
        done
    done
    echo "serving: ${urls[*]}${prefill_urls[*]:+, computing prompts: ${prefill_urls[*]}}"
}

train() {
    local code=0
    on trainers torchrun --nnodes "$train_nodes" --nproc-per-node "${GPUS_PER_NODE:-8}" \
        --rdzv-backend c10d --rdzv-endpoint "${trainers[0]}:${TRAIN_PORT:-29500}" \
        --rdzv-id "$SLURM_JOB_ID" ${SHUTDOWN_TIMEOUT_S:+--shutdown-timeout "$SHUTDOWN_TIMEOUT_S"} \
        "$@" "${resume[@]}" &
    training=$!

    wait -n "$training" "$serving" || true
    if kill -0 "$training" 2>/dev/null; then
        fail_for_servers "a server ended before the trainer"
    fi
    wait "$training" || code=$?
    exit "$code"
}
