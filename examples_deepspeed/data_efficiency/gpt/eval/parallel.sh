#!/usr/bin/env bash
# What the parallel runs of this folder share. Not run by itself.
source "$(dirname "${BASH_SOURCE[0]}")/../../data_efficiency.sh"

# Each GPU evaluates every NUM_GPUS-th row of TASKS, one after the other.
evaluate_rows() { # BATCH FEWSHOT RESULTS [CHECKPOINT ...] --flag value ...
    local batch=${BATCH_SIZE:-$1} shots=${NUM_FEWSHOT:-$2} results=${RESULT_PATH:-$HERE/$3}
    local config=${CONFIG_PATH:-ds_config_eval_dummy.json} checkpoints=() rows=() gpu failed=0 jobs=()
    shift 3
    while [[ $# -gt 0 && $1 != --* ]]; do
        checkpoints+=("$1")
        shift
    done
    ((${#checkpoints[@]})) || read -ra checkpoints <<<"${CHECKPOINT_PATHS:-}"
    ((${#checkpoints[@]})) || fail "name checkpoints as arguments, or in CHECKPOINT_PATHS"
    # shellcheck disable=SC2206 # rows are words
    rows=($TASKS)
    if [[ -z ${NUM_GPUS:-} ]]; then
        NUM_GPUS=$(nvidia-smi -L 2>/dev/null | wc -l) || true
        ((NUM_GPUS)) || NUM_GPUS=1
    fi
    if [[ -n ${DRY_RUN:-} ]]; then
        for gpu in "${!rows[@]}"; do
            evaluate_row "$gpu" "$@"
        done
        return
    fi
    for ((gpu = 0; gpu < NUM_GPUS; gpu++)); do
        evaluate_share "$gpu" "$@" &
        jobs+=($!)
    done
    for gpu in "${jobs[@]}"; do
        await "$gpu" || failed=1
    done
    python "$HERE/ds_evalharness_gather_result.py" "$results"
    return $failed
}

evaluate_share() { # GPU --flag value ...
    local row status=0
    for ((row = $1; row < ${#rows[@]}; row += NUM_GPUS)); do
        evaluate_row "$row" "${@:2}" || status=1
    done
    return $status
}

evaluate_row() { # ROW --flag value ...
    local checkpoint status=0
    for checkpoint in "${checkpoints[@]}"; do
        bash "$HERE/ds_evalharness_1gpu.sh" "$checkpoint" "$config" "$results" \
            $(($1 % NUM_GPUS)) "${rows[$1]}" "${HOST_OF_GPUS:-localhost}" "$batch" "$shots" \
            "${@:2}" || status=1
    done
    return $status
}
