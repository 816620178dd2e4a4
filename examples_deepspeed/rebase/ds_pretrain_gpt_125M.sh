#!/usr/bin/env bash
# A GPT of 125 million weights on one node: 2 tensor-parallel ranks, 2 stages, ZeRO 1.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=0.125 MP_SIZE=2 PP_SIZE=2 BATCH_SIZE=2 LOG_INTERVAL=100 EVAL_ITERS=100 \
    EVAL_INTERVAL=1000 SAVE_INTERVAL=1000
DATA=BookCorpusDataset_text_document TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
rebase_gpt3 "$@"
