#!/usr/bin/env bash
# Megatron-LM's script: fine-tunes BERT with 345 million weights on RACE, data parallel over 8
# processes.
here=$(dirname "$0")/$(dirname "$(readlink "$0" || echo .)") # the script may be a link to this one
source "$here/megatron.sh"

: "${TRAIN_DATA:=data/RACE/train/middle}"
: "${VALID_DATA:=data/RACE/dev/middle data/RACE/dev/high}"
megatron_lm_finetune 8 RACE bert_345m_race --seed 1234 --epochs 3 --micro-batch-size 4 --lr 1.0e-5 \
    --lr-warmup-fraction 0.06 --clip-grad 1.0 --save-interval 100000 "$@"
