#!/usr/bin/env bash
# The same with --use-flash-attn, which is accepted: --attention-backend chooses the kernel.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=0.125 MP_SIZE=2 PP_SIZE=2 BATCH_SIZE=2 LOG_INTERVAL=100 EVAL_ITERS=100 \
    EVAL_INTERVAL=1000 SAVE_INTERVAL=1000
DATA=BookCorpusDataset_text_document TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
rebase_gpt3 --use-flash-attn "$@"
