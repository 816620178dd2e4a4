#!/usr/bin/env bash
# Fine-tunes a BERT of 336 million weights (PRETRAINED_CHECKPOINT) on QQP:
# ds_finetune_bert_qqp.sh [SEED] [FLAG ...]. ds_finetune_gather_result.py reads the logs of several seeds.
source "$(dirname "$0")/../../../megatron_deepspeed.sh"

defaults ACTIVATION_CHECKPOINT=false
finetune_bert QQP "$@"
