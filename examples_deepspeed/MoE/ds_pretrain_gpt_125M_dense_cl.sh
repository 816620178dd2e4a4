#!/usr/bin/env bash
# A dense GPT of 125 million weights with a batch of 2048 and samples that grow from 72 to 2048 tokens.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=0.125 GLOBAL_BATCH_SIZE=2048 BATCH_SIZE=16 LR=2.4e-3 MIN_LR=6.0e-5
PROCESSES=128 TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
curriculum_gpt3 "$@"
