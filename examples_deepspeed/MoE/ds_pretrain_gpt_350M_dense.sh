#!/usr/bin/env bash
# A dense GPT of 350 million weights, to compare experts with: fp16, ZeRO 0.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=0.35 BATCH_SIZE=4 INIT_STD=0.014
PROCESSES=64 TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
moe_gpt3 "$@"
