#!/usr/bin/env bash
# What the scripts of this folder share. Not run by itself:
#
#     source "$(dirname "$0")/../../data_efficiency.sh"
#     positions NAME ... -- "$@"    variables from the arguments before the first flag; REST has the others
#     data_efficiency FAMILY LENGTH    JSON and flags of a run: TEMPLATE, TEMPLATE_VALUES, OPTIONS
#     include HOST:GPUS PORT        where the processes are
#     block NAME ... -- "$@"        the recipe that the first argument names; REST has the others
source "$(dirname "${BASH_SOURCE[0]}")/../megatron_deepspeed.sh"

# Empty arguments leave a variable to the environment and the script.
positions() { # NAME ... -- ARGUMENT ...
    local names=() name
    while [[ $1 != -- ]]; do
        names+=("$1")
        shift
    done
    shift
    for name in "${names[@]}"; do
        [[ $# -gt 0 && $1 != --* ]] || break
        [[ -z $1 ]] || printf -v "$name" %s "$1"
        shift
    done
    REST=("$@")
}

# The ten arguments of a metric.
METRIC=(METRIC INDEX_TO_SAMPLE_PATH INDEX_TO_METRIC_PATH DIFFICULTY_TYPE CLUSTERING_TYPE MIN MAX)
metric() { # NAME OF TOTAL_STEP
    printf '%s\n' "${METRIC[@]/#/$1_}" "$1_$2" "$1_DIFFICULTY_STEP" "$1_ROOT"
}

# A number from one with decimals.
calculate() { # EXPRESSION
    awk "BEGIN { printf \"%.0f\", $1 }"
}

# Steps between two of NUM_SAVE checkpoints.
save_interval() { # STEPS
    echo $(($1 / NUM_SAVE > 0 ? $1 / NUM_SAVE : 1))
}

# The curriculum and its JSON. Sample and metric paths are of ds_analyze_*_data_reduce.sh.
data_efficiency() { # gpt|bert LENGTH
    local name number values=() middle
    defaults CL_NUM_METRIC=1 SEED=1234
    TEMPLATE=$HERE/ds_config_$1_1clmetric_TEMPLATE.json OPTIONS=() JOB_CURRICULUM=''
    ((CL_NUM_METRIC == 1)) || TEMPLATE=$HERE/ds_config_$1_2clmetrics_TEMPLATE.json
    for number in 1ST 2ND; do
        name=CL_$number
        defaults "${name}_METRIC=dummy" "${name}_INDEX_TO_SAMPLE_PATH=dummy" \
            "${name}_INDEX_TO_METRIC_PATH=dummy" "${name}_DIFFICULTY_TYPE=value" \
            "${name}_CLUSTERING_TYPE=single_cluster" "${name}_MIN=$2" "${name}_MAX=$2" \
            "${name}_TOTAL_STEP=1" "${name}_DIFFICULTY_STEP=1" "${name}_ROOT=1"
        curriculum "$name" "CL_${number,,}"
        ((CL_NUM_METRIC > 1)) || break
    done
    # All layers but the first and the last one.
    middle=$(seq -s ', ' 1 $((NUM_LAYERS - 2)))
    TEMPLATE_VALUES=(DATA_EFFICIENCY_SEED="$SEED" LTD_ENABLED="$LTD_ENABLED" LTD_MIN="$LTD_START"
        LTD_MAX="$SEQ_LEN" LTD_STEP="$LTD_STEP" LTD_TOTAL_LAYERS="$NUM_LAYERS"
        LTD_LAYER_NUM=$((NUM_LAYERS - 2)) LTD_LAYER_ID="[$middle]" CL_ENABLED="$CL_ENABLED" "${values[@]}"
        DATA_SAMPLING_NUM_WORKERS="${num_workers:-0}")
    if [[ $LTD_ENABLED == true ]]; then
        OPTIONS+=(--random-ltd)
        JOB_CURRICULUM+=_ltd_${LTD_START}_$LTD_STEP
    fi
    [[ $CL_ENABLED != true ]] || OPTIONS+=(--data-efficiency-curriculum-learning)
}

curriculum() { # PREFIX TEMPLATE_PREFIX
    local metric=$1_METRIC sample=$1_INDEX_TO_SAMPLE_PATH values_path=$1_INDEX_TO_METRIC_PATH
    local type=$1_DIFFICULTY_TYPE cluster=$1_CLUSTERING_TYPE min=$1_MIN max=$1_MAX
    local total=$1_TOTAL_STEP step=$1_DIFFICULTY_STEP root=$1_ROOT
    values+=("$2_METRIC_NAME=${!metric}" "$2_SAMPLE_PATH=${!sample}" "$2_METRIC_PATH=${!values_path}"
        "$2_DIFF_TYPE=${!type}" "$2_CLUSTER_TYPE=${!cluster}" "$2_MIN=${!min}" "$2_MAX=${!max}"
        "$2_TOTAL_STEP=${!total}" "$2_DIFF_STEP=${!step}" "$2_ROOT=${!root}")
    [[ $CL_ENABLED != true ]] ||
        JOB_CURRICULUM+=_cl_${!metric}_${!min}_${!max}_${!total}_${!root}
}

# The run's folder of clusters, which the curriculum writes.
clusters() {
    folders
    CLUSTERS=$OUTPUT_BASEPATH/data_cluster/$JOB_NAME
    [[ -n ${DRY_RUN:-} || $CL_ENABLED != true ]] || mkdir -p "$CLUSTERS"
    TEMPLATE_VALUES+=(CL_CLUSTER_PATH="$CLUSTERS")
}

# Every recipe of these files was commented out by their authors, so that they did nothing.
block() { # NAME ... -- ARGUMENT ...
    local names=()
    while [[ $1 != -- ]]; do
        names+=("$1")
        shift
    done
    shift
    if [[ " ${names[*]} " != *" ${1:-none} "* ]]; then
        echo "${0##*/}: uncomment one block, here: name it as the first argument: ${names[*]}" >&2
        exit 1
    fi
    # shellcheck disable=SC2034 # the scripts read it
    BLOCK=$1 REST=("${@:2}")
}

# Processes on some GPUs of a host, as deepspeed --include names them; on a machine without GPUs as
# many on its CPU.
# shellcheck disable=SC2034 # the launcher reads these
include() { # HOST:GPU,GPU PORT
    local slots
    IFS=, read -ra slots <<<"${1##*:}"
    [[ $1 == *:*[0-9] ]] || fail "$1: expected HOST:GPU,GPU, such as localhost:0,1"
    [[ $2 =~ ^[0-9]+$ ]] || fail "$2: expected a port"
    COUNTED=1 NUM_NODE=1 NUM_GPUS=${#slots[@]} NUM_GPUS_PERNODE=${#slots[@]} GPUS='' MASTER_PORT=$2
    if [[ ${LAUNCHER:-deepspeed} == deepspeed && -n ${HOSTFILE:-} ]]; then
        INCLUDE=$1
    elif [[ ${LAUNCHER:-deepspeed} == deepspeed ]] && command -v nvidia-smi >/dev/null; then
        DEEPSPEED_FLAGS="--include=$1 ${DEEPSPEED_FLAGS:-}"
    else
        GPUS=${#slots[@]}
    fi
    DEEPSPEED_FLAGS="${DEEPSPEED_FLAGS:-} --master_port=$2"
}
