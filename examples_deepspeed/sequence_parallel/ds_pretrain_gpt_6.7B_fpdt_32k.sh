#!/usr/bin/env bash
# Samples of 262,144 tokens, each cut over 4 ranks, with attention in chunks of 65,536 that wait in main
# memory (FPDT). The 32k of the name is not its length.
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=6.7 SEQ_LEN=262144 SP_SIZE=4 GLOBAL_BATCH_SIZE=1024 BATCH_SIZE=2 ZERO_STAGE=3 \
    NO_PP=true LOG_OPTIMIZER_STATE=false
DATA=BookCorpusDataset_text_document TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
rebase_gpt3 --ds-sequence-parallel-size "$SP_SIZE" --ds-sequence-parallel-fpdt \
    --ds-sequence-parallel-fpdt-chunk-size 65536 --ds-sequence-parallel-fpdt-offloading \
    --use-rotary-position-embeddings --rotary-percent 0.25 \
    --rotary-position-embeddings-theta 100000000 --attention-dropout 0.0 --hidden-dropout 0.0 \
    --use-flash-attn-v2 --checkpoint-in-cpu "$@"
