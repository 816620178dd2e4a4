#!/usr/bin/env bash
# Samples of 32,768 tokens, each cut over 4 ranks (Ulysses).
source "$(dirname "$0")/../megatron_deepspeed.sh"

defaults MODEL_SIZE=30 ZERO_STAGE=3 SEQ_LEN=32768 SP_SIZE=4 GLOBAL_BATCH_SIZE=2 BATCH_SIZE=1 NO_PP=true
DATA=BookCorpusDataset_text_document TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
rebase_gpt3 --ds-sequence-parallel-size "$SP_SIZE" --use-flash-attn-triton "$@"
