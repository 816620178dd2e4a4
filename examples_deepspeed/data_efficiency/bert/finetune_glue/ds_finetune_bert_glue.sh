#!/usr/bin/env bash
# Fine-tunes a BERT of 336 million weights on a task of GLUE:
#
#     ds_finetune_bert_glue.sh HOST:GPUS PORT SEED TASK LR CHECKPOINT [FLAG ...]
#
# HOST:GPUS is what deepspeed --include has, such as worker-0:0,1,2,3 of the hosts in HOSTFILE, or
# localhost:0,1. TASK is RTE, MRPC, STS-B, CoLA, SST-2, QNLI, QQP or MNLI; its files are
# DATA_HOME/TASK/train.tsv and dev.tsv.
source "$(dirname "$0")/../../data_efficiency.sh"

(($# >= 6)) || fail "give HOST:GPUS PORT SEED TASK LR CHECKPOINT"
include "$1" "$2"
# shellcheck disable=SC2034 # finetune_bert reads it
PRETRAINED_CHECKPOINT=$6
defaults SEED="$3" LR="$5" ACTIVATION_CHECKPOINT=false GLOBAL_BATCH_SIZE=32 BATCH_SIZE=8 EPOCHS=3 \
    LR_WARMUP_FRACTION=0.1
finetune_bert "$4" "${@:7}"
