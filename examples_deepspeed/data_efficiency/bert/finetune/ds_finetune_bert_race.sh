#!/usr/bin/env bash
# Fine-tunes a BERT of 336 million weights (PRETRAINED_CHECKPOINT) on RACE's middle school texts:
# ds_finetune_bert_race.sh [SEED] [FLAG ...]. ds_finetune_gather_result.py reads the logs of several seeds.
source "$(dirname "$0")/../../../megatron_deepspeed.sh"

defaults ACTIVATION_CHECKPOINT=false DATA_HOME="${BASE_DATA_PATH:-dataset}"
defaults VALID_DATA="$DATA_HOME/RACE/dev/middle $DATA_HOME/RACE/test/middle"
finetune_bert RACE "$@"
