#!/usr/bin/env bash
# A GPT of 1.3 billion weights by a curriculum over metrics of the data, or without; ZeRO 1.
#
#     ds_pretrain_gpt_1.3B_dense_base_script.sh LR TOKENS LTD_ENABLED LTD_START LTD_STEP CL_ENABLED \
#         CL_NUM_METRIC NAME SAMPLES VALUES TYPE CLUSTERING MIN MAX STEPS MULTIPLE ROOT \
#         NAME SAMPLES VALUES TYPE CLUSTERING MIN MAX STEPS MULTIPLE ROOT [FLAG ...]
#
# Arguments may be left out at the end, or empty: 2.0e-4 300 (billions) false 2048 1 false 1, and of
# each metric dummy dummy dummy value single_cluster 2048 2048 1 1 1. Each is a variable, too: LR,
# TRAIN_TOKENS_IN_BILLION, LTD_ENABLED ... CL_1ST_METRIC ... CL_2ND_ROOT. SAMPLES and VALUES are the
# files of ../ds_analyze_gpt_data_reduce.sh. LTD_ENABLED true lets the layers but the first and the
# last one drop tokens: they keep LTD_START of them at first, and all after LTD_STEP steps.
source "$(dirname "$0")/../../data_efficiency.sh"

mapfile -t first < <(metric CL_1ST TOTAL_STEP)
mapfile -t second < <(metric CL_2ND TOTAL_STEP)
positions LR TRAIN_TOKENS_IN_BILLION LTD_ENABLED LTD_START LTD_STEP CL_ENABLED CL_NUM_METRIC \
    "${first[@]}" "${second[@]}" -- "$@"
defaults MODEL_SIZE=1.3 MIN_LR=1.0e-6 SEQ_LEN=2048 MP_SIZE=1 PP_SIZE=1 NO_PP=true ZERO_STAGE=1 \
    TRAIN_TOKENS_IN_BILLION=300 LTD_ENABLED=false LTD_START=2048 LTD_STEP=1 CL_ENABLED=false \
    LR_WARMUP_TOKENS_IN_MILLION=3000 LOG_INTERVAL=100 NUM_SAVE=100
defaults TRAIN_TOKENS="$(calculate "$TRAIN_TOKENS_IN_BILLION * 1e9")"
gpt3_shape
# The data set is as large for every number of tokens, as in Megatron-DeepSpeed; trials have a small one.
defaults TRAIN_SAMPLES=$(((TRAIN_TOKENS < 1000000000 ? TRAIN_TOKENS : 300000000000) * 2 / SEQ_LEN)) \
    SAVE_INTERVAL="$(save_interval $((TRAIN_TOKENS / SEQ_LEN / GLOBAL_BATCH_SIZE)))"
data_efficiency gpt "$SEQ_LEN"
processes 8
defaults BATCH_SIZE=$((GLOBAL_BATCH_SIZE * PP_SIZE * MP_SIZE / NUM_GPUS))
defaults JOB_NAME="gpt_${MODEL_SIZE}B_tok${TRAIN_TOKENS_IN_BILLION}B_lr${LR}_min${MIN_LR}_gbs${GLOBAL_BATCH_SIZE}_mbs${BATCH_SIZE}_g${NUM_GPUS}_z${ZERO_STAGE}_seed$SEED$JOB_CURRICULUM"
clusters
rebase_gpt3 "${OPTIONS[@]}" "${REST[@]}"
