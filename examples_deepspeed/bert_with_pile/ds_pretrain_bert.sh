#!/usr/bin/env bash
# A BERT of 336 million weights: 2 million steps of 1024 samples, ZeRO 0.
source "$(dirname "$0")/../megatron_deepspeed.sh"

declare -A BERT=([0.11]="12 768 12" [0.336]="24 1024 16" [1.3]="24 2048 32" [3.9]="48 2560 40")
defaults MODEL_SIZE=0.336
read -ra shape <<<"${BERT[$MODEL_SIZE]:-}"
((${#shape[@]})) || fail "MODEL_SIZE $MODEL_SIZE is not one of ${!BERT[*]}"
defaults NUM_LAYERS="${shape[0]}" HIDDEN_SIZE="${shape[1]}" NUM_ATTN_HEADS="${shape[2]}"
PROCESSES=64 TEMPLATE=$HERE/ds_config_bert_TEMPLATE.json
pretrain_pile_bert "$@"
