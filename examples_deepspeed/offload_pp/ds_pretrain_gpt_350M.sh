#!/usr/bin/env bash
# A GPT of 350 million weights at ZeRO 3, whose optimizer updates 30 % of its states in main memory
# (offload_optimizer.ratio) and the rest on the GPU.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=0.35 BATCH_SIZE=2 INIT_STD=0.014 ZERO_STAGE=3 LOG_INTERVAL=1 \
    RAMPUP_BATCH_SIZE="32 32 1953125"
PROCESSES=16 DATA=BookCorpusDataset_text_document TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
moe_gpt3 --timing-log-level 1 --no-pipeline-parallel --cpu-optimizer "$@"
