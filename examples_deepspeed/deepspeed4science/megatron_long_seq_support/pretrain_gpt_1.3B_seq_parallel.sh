#!/usr/bin/env bash
# A GPT of 1.3 billion weights over 8 tensor-parallel ranks that share the sequence as well
# (--sequence-parallel); N_K thousands of tokens. The JSON profiles the first step.
source "$(dirname "$0")/../../megatron_deepspeed.sh"

defaults MODEL_SIZE=1.3 MP_SIZE=8 N_K=2 ZERO_STAGE=0 GLOBAL_BATCH_SIZE=2 BATCH_SIZE=1 NO_PP=true
defaults SEQ_LEN=$((1024 * N_K)) ENABLE_SEQUENCE_PARALLEL=1
[[ $ENABLE_SEQUENCE_PARALLEL != 1 ]] || set -- --sequence-parallel "$@"
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
PROCESSES=8 DATA=BookCorpusDataset_text_document TEMPLATE=$HERE/ds_config_gpt_TEMPLATE.json
rebase_gpt3 --use-flash-attn-triton "$@"
