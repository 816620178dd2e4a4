#!/usr/bin/env bash
# Every task of GLUE with five seeds and four rates, 160 runs one after the other:
#
#     ds_finetune_bert_glue_run.sh HOST:GPUS PORT CHECKPOINT [FLAG ...]
#
# TASKS, SEEDS and LRS choose fewer, separated by spaces. A run that fails ends them.
set -euo pipefail
folder=$(dirname "$0")
if (($# < 3)); then
    echo "${0##*/}: error: give HOST:GPUS PORT CHECKPOINT" >&2
    exit 2
fi
for task in ${TASKS:-RTE MRPC STS-B CoLA SST-2 QNLI QQP MNLI}; do
    for seed in ${SEEDS:-1234 1235 1236 1237 1238}; do
        for lr in ${LRS:-2e-5 3e-5 4e-5 5e-5}; do
            # Each run has a folder of its own.
            CHECKPOINT_PATH=${CHECKPOINT_PATH:+$CHECKPOINT_PATH/$task-lr$lr-seed$seed} \
                bash "$folder/ds_finetune_bert_glue.sh" "$1" "$2" "$seed" "$task" "$lr" "$3" "${@:4}"
        done
    done
done
