#!/usr/bin/env bash
# A dense GPT of 1.3 billion weights with a batch of 4096 and samples that grow from 80 to 2048 tokens.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=1.3 GLOBAL_BATCH_SIZE=4096 BATCH_SIZE=16 MP_SIZE=2 LR=8.0e-4 MIN_LR=2.0e-5
PROCESSES=128 START=80 TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
curriculum_gpt3 "$@"
