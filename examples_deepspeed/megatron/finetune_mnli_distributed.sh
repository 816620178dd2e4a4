#!/usr/bin/env bash
# Megatron-LM's script: fine-tunes BERT with 345 million weights on MNLI, data parallel over 8
# processes.
here=$(dirname "$0")/$(dirname "$(readlink "$0" || echo .)") # the script may be a link to this one
source "$here/megatron.sh"

: "${TRAIN_DATA:=data/glue_data/MNLI/train.tsv}"
: "${VALID_DATA:=data/glue_data/MNLI/dev_matched.tsv data/glue_data/MNLI/dev_mismatched.tsv}"
megatron_lm_finetune 8 MNLI bert_345m_mnli --seed 1234 --epochs 5 --micro-batch-size 8 --lr 5.0e-5 \
    --lr-warmup-fraction 0.065 --save-interval 500000 "$@"
