#!/usr/bin/env bash
# Fine-tunes the BERT of ds_pretrain_bert.sh on RACE: ds_finetune_bert_race.sh [SEED].
source "$(dirname "$0")/../megatron_deepspeed.sh"

finetune_bert RACE "$@"
