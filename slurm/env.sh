# What the batch scripts share: the plan, the step on every node, the signal before the time limit, the requeue.
#
# Optional variables, set in the environment (sbatch passes it on) or in slurm/site.sh, which is sourced first if it
# exists (it may also load modules, and set proxies and NCCL's variables):
#   AERIE_VENV          the virtual environment (.venv)
#   AERIE_PROCESSES     processes a node (its GPUs, else 1)
#   AERIE_LAUNCH        options for accelerate launch, as '--zero_stage 3' (--mixed_precision bf16 where there are GPUs)
#   AERIE_MAIN_ADDRESS  where the other nodes reach the first one (SLURM's NodeAddr of it)
#   AERIE_MAIN_PORT     and the port there (from the job's number; one node alone takes any free port)
#   AERIE_SHARDS        the number of shares, if the array's indices are not 1-n (some shares are submitted again)
#   AERIE_SERVERS       served.sbatch: so many of the nodes are vLLM servers (1)
#   AERIE_SERVER_VENV   where vLLM is installed (by default the command vllm is looked for in PATH)
#   AERIE_SERVER_WORDS  further options of vllm serve, as '--tensor-parallel-size 8'
#   AERIE_SERVER_PORT   where the servers listen (8000)
#   AERIE_LOGS          where each job's status file goes (slurm/logs)
set -uo pipefail

if [[ -f slurm/site.sh ]]; then source slurm/site.sh; fi
PATH="$(realpath "${AERIE_VENV:-.venv}")/bin:$PATH"
processes=${AERIE_PROCESSES:-${SLURM_GPUS_ON_NODE:-1}}
cpus=${SLURM_CPUS_PER_TASK:-$processes}
export PATH SRUN_CPUS_PER_TASK=$cpus SLURM_EXPORT_ENV=ALL # else a step lacks the CPUs and, after --export, variables
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cpus > processes ? cpus / processes : 1))}
job=${SLURM_JOB_ID:-}
[[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
caught='' words=()
hosts=${SLURM_JOB_NODELIST:-} num_hosts=${SLURM_NNODES:-1} # the nodes that work; servers have others

# begin RECIPE ...: call it first, with the script's own arguments.
begin() {
    if [[ ! -f ${1:-} ]]; then
        echo "error: no recipe ${1:-given}; submit from the checkout: sbatch slurm/train.sbatch RECIPE [--section.key VALUE]" >&2
        exit 2
    fi
    status_file=${AERIE_LOGS:-slurm/logs}/$SLURM_JOB_NAME-$SLURM_JOB_ID.json
    mkdir -p "${status_file%/*}"
    write_status running 0
    trap 'caught=USR1' USR1 # --signal=B:USR1@300: the time limit is near
    # scancel or the time limit: SLURM stops the step itself, and this script soon after.
    trap 'caught=TERM; write_status interrupted 143' TERM
}

# plan SCRIPT ...: reports a mistake in one line, with exit code 2, before any node works. A requeued job skips it.
plan() {
    ((${SLURM_RESTART_COUNT:-0})) && return
    WORLD_SIZE=$((num_hosts * processes)) python "$@" --plan || end $?
}

# launch SCRIPT ...: starts $processes processes on every node; they find each other at the first node.
launch() {
    local first options=''
    first=$(address "$(scontrol show hostnames "$hosts" | head -n 1)")
    ((${SLURM_GPUS_ON_NODE:-0})) && options='--mixed_precision bf16'
    export AERIE_LAUNCH=${AERIE_LAUNCH-$options} AERIE_MAIN_ADDRESS=${AERIE_MAIN_ADDRESS:-$first}
    # A port per job, so that two jobs on one node do not clash, and below the ports that systems assign themselves.
    export AERIE_MAIN_PORT=${AERIE_MAIN_PORT:-$((num_hosts > 1 ? 10000 + SLURM_JOB_ID % 20000 : 0))}
    step "--nodes=$num_hosts --ntasks=$num_hosts --ntasks-per-node=1 --nodelist=$hosts" on_every_node "$@"
}

# address NODE: where other nodes reach it.
address() {
    scontrol --oneliner show node "$1" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p'
}

# alone SCRIPT ...: starts one process on the first node.
alone() {
    step "--nodes=1 --ntasks=1 --nodelist=$(scontrol show hostnames "$hosts" | head -n 1)" on_one_node "$@"
}

# leave_servers N: leaves the first N nodes to servers.
leave_servers() {
    local names
    mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    num_servers=$1 num_hosts=$((${#names[@]} - $1))
    if ((num_servers < 1 || num_hosts < 1)); then
        echo "error: AERIE_SERVERS=$1 of ${#names[@]} nodes: at least one node serves, and one trains (sbatch --nodes)" >&2
        end 2
    fi
    server_hosts=$(IFS=,; echo "${names[*]:0:num_servers}") hosts=$(IFS=,; echo "${names[*]:num_servers}")
    server_urls=()
    for name in "${names[@]:0:num_servers}"; do
        server_urls+=("http://$(address "$name"):${AERIE_SERVER_PORT:-8000}/v1")
    done
}

# asking STAGE HOW 'SCRIPT ...' --config ...: runs a stage (by `alone` or `launch`) beside the servers that it asks.
asking() {
    local stage=$1 how=$2 script=$3 key=features command servers=''
    shift 3
    [[ $stage != distill ]] || key=distill
    command=$(python slurm/server_command.py "$stage" "$@") || end $?
    if [[ -n $command ]]; then
        set -- "$@" "--$key.server.urls" "[$(IFS=,; echo "${server_urls[*]}")]"
        command=$(python slurm/server_command.py "$stage" "$@") || end $?
        serve "$command"
    fi
    # shellcheck disable=SC2086
    "$how" $script "$@"
    [[ -z $servers ]] || kill $servers 2>/dev/null # srun ends the step
    [[ -z $servers ]] || wait $servers
}

# serve COMMAND: starts it on every server node, and waits until all servers answer. Sets $servers to the step's srun.
serve() {
    local path="${AERIE_SERVER_VENV:+$(realpath "$AERIE_SERVER_VENV")/bin:}$PATH"
    # One server that fails ends all, and so the job: none waits for it.
    srun --kill-on-bad-exit=1 --nodes="$num_servers" --ntasks="$num_servers" --ntasks-per-node=1 --nodelist="$server_hosts" \
        env PATH="$path" bash -c "exec env $1 ${AERIE_SERVER_WORDS:-}" &
    servers=$!
    for url in "${server_urls[@]}"; do
        until python -c 'import sys, urllib.request as web; web.urlopen(sys.argv[1] + "/models", timeout=9)' "$url" 2>/dev/null; do
            [[ -z $caught ]] || end 75
            if ! kill -0 $servers 2>/dev/null; then
                echo "error: the servers ended before they answered: $1" >&2
                end 1
            fi
            sleep 2 &
            wait $!
        done
    done
}

# share: prints the options that name an array task's share; prints nothing outside an array.
share() {
    [[ -n ${SLURM_ARRAY_TASK_ID:-} ]] || return 0
    local last=$SLURM_ARRAY_TASK_MAX
    if [[ -z ${AERIE_SHARDS:-} && $SLURM_ARRAY_TASK_MIN-$SLURM_ARRAY_TASK_COUNT != "1-$last" ]]; then
        echo "error: --array=1-n makes n shares; to submit some of them again say how many there are (AERIE_SHARDS=n)" >&2
        return 2
    fi
    echo "--shard $SLURM_ARRAY_TASK_ID/${AERIE_SHARDS:-$last}"
}

# end CODE: records in the status file how the job ended, and exits. After USR1 it requeues the job, unless the run
# ended by a mistake (code 2), which another start would only repeat.
end() {
    local code=$1 state=failed
    if ((code == 0)); then
        state=done
    elif [[ $caught == TERM ]]; then
        state=interrupted code=143
    elif [[ $caught == USR1 && $(python slurm/state.py --since "$status_file" "${words[@]}") != "failed 2" ]]; then
        state=requeue code=75
    fi
    write_status "$state" "$code"
    if [[ $state == requeue ]]; then
        # $job names the task too: one task's SLURM_JOB_ID is the array's number, and would requeue all tasks.
        scontrol requeue "$job" || echo "error: not requeued; the same command goes on from where this job stopped" >&2
    fi
    exit "$code"
}

write_status() {
    local name=${SLURM_JOB_NAME//[[:cntrl:]]/ } # JSON holds no control characters, and escapes these two:
    name=${name//\\/\\\\}
    name=${name//\"/\\\"}
    printf '{"job": "%s", "name": "%s", "nodes": "%s", "attempt": %d, "state": "%s", "code": %d}\n' \
        "$job" "$name" "$SLURM_JOB_NODELIST" $((${SLURM_RESTART_COUNT:-0} + 1)) "$1" "$2" >"$status_file.tmp"
    mv "$status_file.tmp" "$status_file"
}

# step 'SRUN OPTIONS' FUNCTION SCRIPT ...: returns when the step has succeeded; otherwise it ends the job.
step() {
    local started code seconds=0
    words=("${@:4}")
    [[ -z $caught ]] || end 75
    # shellcheck disable=SC2086
    srun --kill-on-bad-exit=1 $1 bash -c 'source slurm/env.sh && "$@"' bash "${@:2}" &
    started=$!
    # Polls, as a signal just before one long wait would be seen only at the step's end.
    while kill -0 $started 2>/dev/null; do
        # srun passes it to every process; one that is still loading misses it, so it is sent every 10 seconds.
        [[ $caught != USR1 ]] || ((seconds++ % 10)) || kill -USR1 $started 2>/dev/null
        sleep 1 &
        wait $! # a signal interrupts it
    done
    wait $started
    code=$?
    ((code == 0)) || end $code
}

# Inside a step. USR1 would kill the launchers between srun and the ranks, so it is ignored from here on; each rank
# handles it again once it has started.
on_every_node() {
    trap '' USR1
    # shellcheck disable=SC2086
    exec accelerate launch --config_file configs/accelerate/multi_node.yaml \
        --num_machines "$SLURM_STEP_NUM_NODES" --num_processes $((SLURM_STEP_NUM_NODES * processes)) --machine_rank "$SLURM_NODEID" \
        --main_process_ip "$AERIE_MAIN_ADDRESS" --main_process_port "$AERIE_MAIN_PORT" $AERIE_LAUNCH "$@"
}

on_one_node() {
    trap '' USR1
    exec python "$@"
}
