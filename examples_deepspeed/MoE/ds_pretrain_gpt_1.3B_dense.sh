#!/usr/bin/env bash
# A dense GPT of 1.3 billion weights, to compare experts with: fp16, ZeRO 0.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=1.3 BATCH_SIZE=2 MP_SIZE=4 INIT_STD=0.014
PROCESSES=64 TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
defaults RAMPUP_BATCH_SIZE="32 32 1953125"
moe_gpt3 "$@"
