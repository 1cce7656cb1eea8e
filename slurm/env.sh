# What the four batch scripts share: the plan, the step on every node, the signal before the time limit, the requeue.
#
# Set in the environment (sbatch hands it on) or in slurm/site.sh, which is read first where there is one (modules,
# proxies, NCCL's variables); all optional:
#   AERIE_VENV          the virtual environment (.venv)
#   AERIE_PROCESSES     processes a node (its GPUs, else 1)
#   AERIE_LAUNCH        words for accelerate launch, as '--zero_stage 3' (--mixed_precision bf16 where there are GPUs)
#   AERIE_MAIN_ADDRESS  where the other nodes reach the first one (SLURM's NodeAddr of it)
#   AERIE_MAIN_PORT     and the port there (from the job's number; one node alone takes any free port)
#   AERIE_SHARDS        the number of shares, where an array's indices are not 1-n (some of them, submitted again)
#   AERIE_LOGS          where each job's status file goes (slurm/logs)
set -uo pipefail

if [[ -f slurm/site.sh ]]; then source slurm/site.sh; fi
PATH="$(realpath "${AERIE_VENV:-.venv}")/bin:$PATH"
processes=${AERIE_PROCESSES:-${SLURM_GPUS_ON_NODE:-1}}
cpus=${SLURM_CPUS_PER_TASK:-$processes}
export PATH SRUN_CPUS_PER_TASK=$cpus SLURM_EXPORT_ENV=ALL # a step inherits neither the CPUs nor, after --export, the rest
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cpus > processes ? cpus / processes : 1))}
job=${SLURM_JOB_ID:-}
[[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
caught='' words=()

# begin RECIPE ...: the first line of a script, with its own words.
begin() {
    if [[ ! -f ${1:-} ]]; then
        echo "error: no recipe ${1:-given}; submit from the checkout: sbatch slurm/train.sbatch RECIPE [--section.key VALUE]" >&2
        exit 2
    fi
    status_file=${AERIE_LOGS:-slurm/logs}/$SLURM_JOB_NAME-$SLURM_JOB_ID.json
    mkdir -p "${status_file%/*}"
    write_status running 0
    trap 'caught=USR1' USR1 # --signal=B:USR1@300: the time limit is near
    # scancel, and the time limit: SLURM itself stops the step, and soon this script too.
    trap 'caught=TERM; write_status interrupted 143' TERM
}

# plan SCRIPT ...: turns a mistake into one line and exit code 2 before any node works. A requeued job has been through it.
plan() {
    ((${SLURM_RESTART_COUNT:-0})) && return
    WORLD_SIZE=$((SLURM_NNODES * processes)) python "$@" --plan || end $?
}

# launch SCRIPT ...: that many processes on every node, which find each other at the first one.
launch() {
    local first options=''
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    first=$(scontrol --oneliner show node "$first" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    ((${SLURM_GPUS_ON_NODE:-0})) && options='--mixed_precision bf16'
    export AERIE_LAUNCH=${AERIE_LAUNCH-$options} AERIE_MAIN_ADDRESS=${AERIE_MAIN_ADDRESS:-$first}
    # Two jobs on one node do not meet; and below the ports that systems give out by themselves.
    export AERIE_MAIN_PORT=${AERIE_MAIN_PORT:-$((SLURM_NNODES > 1 ? 10000 + SLURM_JOB_ID % 20000 : 0))}
    step "--nodes=$SLURM_NNODES --ntasks=$SLURM_NNODES --ntasks-per-node=1" on_every_node "$@"
}

# alone SCRIPT ...: one process on the first node.
alone() {
    step "--nodes=1 --ntasks=1" on_one_node "$@"
}

# share: the words that name an array task's share; none outside an array.
share() {
    [[ -n ${SLURM_ARRAY_TASK_ID:-} ]] || return 0
    local last=$SLURM_ARRAY_TASK_MAX
    if [[ -z ${AERIE_SHARDS:-} && $SLURM_ARRAY_TASK_MIN-$SLURM_ARRAY_TASK_COUNT != "1-$last" ]]; then
        echo "error: --array=1-n makes n shares; to submit some of them again say how many there are (AERIE_SHARDS=n)" >&2
        return 2
    fi
    echo "--shard $SLURM_ARRAY_TASK_ID/${AERIE_SHARDS:-$last}"
}

# end CODE: what became of the job, in its status file and for SLURM. After USR1 it asks to be started again, unless the
# run says that it was a mistake (code 2), which another start would only repeat.
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
        # One task of an array has the array's number: by that alone all of them would be requeued.
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

# step 'SRUN OPTIONS' FUNCTION SCRIPT ...: returns when it is done, ends the job otherwise.
step() {
    local started code seconds=0
    words=("${@:4}")
    [[ -z $caught ]] || end 75
    # shellcheck disable=SC2086
    srun --kill-on-bad-exit=1 $1 bash -c 'source slurm/env.sh && "$@"' bash "${@:2}" &
    started=$!
    # By turns: a signal that came just before the wait for its end would be seen only then.
    while kill -0 $started 2>/dev/null; do
        # srun hands it to every process on every node; one that is still loading misses it, so again and again.
        [[ $caught != USR1 ]] || ((seconds++ % 10)) || kill -USR1 $started 2>/dev/null
        sleep 1 &
        wait $! # a signal interrupts it
    done
    wait $started
    code=$?
    ((code == 0)) || end $code
}

# Within a step. USR1 would end the launchers between srun and the ranks: from here on it is ignored, and each rank
# listens to it by itself as soon as it can.
on_every_node() {
    trap '' USR1
    # shellcheck disable=SC2086
    exec accelerate launch --config_file configs/accelerate/multi_node.yaml \
        --num_machines "$SLURM_NNODES" --num_processes $((SLURM_NNODES * processes)) --machine_rank "$SLURM_NODEID" \
        --main_process_ip "$AERIE_MAIN_ADDRESS" --main_process_port "$AERIE_MAIN_PORT" $AERIE_LAUNCH "$@"
}

on_one_node() {
    trap '' USR1
    exec python "$@"
}
