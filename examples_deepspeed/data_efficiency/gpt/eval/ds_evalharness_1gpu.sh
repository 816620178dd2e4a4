#!/usr/bin/env bash
# Evaluates a checkpoint on some tasks with the language model evaluation harness, on one GPU:
#
#     ds_evalharness_1gpu.sh CHECKPOINT CONFIG RESULTS GPU TASKS HOST BATCH FEWSHOT [FLAG ...]
#
# Writes RESULTS/<last two folders of CHECKPOINT>/TASKS_FEWSHOTshot.json and .log. TASKS are separated
# by commas; HOST is localhost, or one of HOSTFILE. The data of the tasks are files of this machine:
# --include_path FOLDER. Vocabulary and sizes are the checkpoint's.
source "$(dirname "$0")/../../data_efficiency.sh"

(($# >= 8)) || fail "give CHECKPOINT CONFIG RESULTS GPU TASKS HOST BATCH FEWSHOT"
# shellcheck disable=SC2034 # evaluate_harness reads it
CHECKPOINT_PATH=${1%/} CONFIG_PATH=$2 TASKS=$5
[[ -f $CONFIG_PATH ]] || CONFIG_PATH=$HERE/$2
results=$3/$(basename "$(dirname "$CHECKPOINT_PATH")")/$(basename "$CHECKPOINT_PATH")
# shellcheck disable=SC2034
name=${5//[^[:alnum:],._-]/_}_${8}shot
# shellcheck disable=SC2034
RESULT_PATH=$results/$name.json
include "$6:$4" $((12345 + $4))
if [[ -z ${DRY_RUN:-} ]]; then
    mkdir -p "$results"
    exec > >(tee -i "$results/$name.log") 2>&1
fi
evaluate_harness "$5" --micro-batch-size "$7" --num_fewshot "$8" "${@:9}"
