#!/usr/bin/env bash
# A BERT of 336 million weights by a curriculum over metrics of the data, or without; ZeRO 0.
#
#     ds_pretrain_bert_336M_base_script.sh LR ITERATIONS LTD_ENABLED LTD_START LTD_STEP DROPOUT \
#         CL_ENABLED CL_NUM_METRIC NAME SAMPLES VALUES TYPE CLUSTERING MIN MAX STEPS MULTIPLE ROOT \
#         NAME SAMPLES VALUES TYPE CLUSTERING MIN MAX STEPS MULTIPLE ROOT [FLAG ...]
#
# Arguments may be left out at the end, or empty: 1e-4 2 false 512 1 0.1 false 1, and of each metric
# dummy dummy dummy value single_cluster 512 512 1 1 1; ITERATIONS, LTD_STEP and STEPS are millions.
# Each is a variable, too: LR, TRAIN_ITERS_IN_MILLION, LTD_ENABLED ... CL_1ST_METRIC ... CL_2ND_ROOT.
# SAMPLES and VALUES are the files of ../ds_analyze_bert_data_reduce.sh. The run ends after as many
# tokens as ITERATIONS of full length have. LTD_ENABLED true lets the layers but the first and the
# last one drop tokens: they keep LTD_START of them at first, and all after LTD_STEP steps.
source "$(dirname "$0")/../../data_efficiency.sh"

mapfile -t first < <(metric CL_1ST TOTAL_STEP_IN_MILLION)
mapfile -t second < <(metric CL_2ND TOTAL_STEP_IN_MILLION)
positions LR TRAIN_ITERS_IN_MILLION LTD_ENABLED LTD_START LTD_STEP_IN_MILLION DROPOUT CL_ENABLED \
    CL_NUM_METRIC "${first[@]}" "${second[@]}" -- "$@"
defaults MODEL_SIZE=0.336 NUM_LAYERS=24 HIDDEN_SIZE=1024 NUM_ATTN_HEADS=16 INIT_STD=0.02 SEQ_LEN=512 \
    GLOBAL_BATCH_SIZE=1024 LR=1e-4 MIN_LR=1e-5 MP_SIZE=1 PP_SIZE=1 NO_PP=true ZERO_STAGE=0 \
    TRAIN_ITERS_IN_MILLION=2 LTD_ENABLED=false LTD_START=512 LTD_STEP_IN_MILLION=1 DROPOUT=0.1 \
    CL_ENABLED=false LOG_INTERVAL=100 EVAL_ITERS=10 EVAL_INTERVAL=1000 NUM_SAVE=100 \
    ACTIVATION_CHECKPOINT=false LOG_OPTIMIZER_STATE=true LR_DECAY_STYLE=linear LR_WARMUP_ITERS=10000 \
    EXIT_DURATION=30000000 SPLIT=949,50,1 WEIGHT_DECAY=1e-2 \
    NUM_WORKERS_OF_DATA="${num_workers:=4}" CL_1ST_TOTAL_STEP_IN_MILLION=1 CL_2ND_TOTAL_STEP_IN_MILLION=1
defaults TRAIN_TOKENS="$(calculate "$TRAIN_ITERS_IN_MILLION * 1e6 * $SEQ_LEN * $GLOBAL_BATCH_SIZE")" \
    LTD_STEP="$(calculate "$LTD_STEP_IN_MILLION * 1e6")" \
    CL_1ST_TOTAL_STEP="$(calculate "$CL_1ST_TOTAL_STEP_IN_MILLION * 1e6")" \
    CL_2ND_TOTAL_STEP="$(calculate "$CL_2ND_TOTAL_STEP_IN_MILLION * 1e6")"
steps=$((TRAIN_TOKENS / SEQ_LEN / GLOBAL_BATCH_SIZE))
# The data set is as large for every number of steps, as in Megatron-DeepSpeed; trials have a small one.
defaults LR_DECAY_TOKENS="$TRAIN_TOKENS" TRAIN_ITERS=$((steps < 100000 ? 2 * steps + 1 : 4000000)) \
    SAVE_INTERVAL="$(save_interval $steps)"
data_efficiency bert "$SEQ_LEN"
if [[ $LTD_ENABLED == true ]]; then
    OPTIONS+=(--attention-dropout "$DROPOUT" --hidden-dropout "$DROPOUT")
fi
processes 8
defaults BATCH_SIZE=$((GLOBAL_BATCH_SIZE * PP_SIZE * MP_SIZE / NUM_GPUS))
defaults JOB_NAME="bert_${MODEL_SIZE}B_it${TRAIN_ITERS_IN_MILLION}M_lr${LR}_min${MIN_LR}_gbs${GLOBAL_BATCH_SIZE}_mbs${BATCH_SIZE}_g${NUM_GPUS}_seed$SEED$JOB_CURRICULUM"
clusters
FLAGS=()
mds_data bert pile_bert_train_text_sentence
deepspeed_flags "$TEMPLATE" "${TEMPLATE_VALUES[@]}"
pretraining_flags
FLAGS+=(--adam-beta2 0.999 --init-method-std "$INIT_STD" --exit-duration-in-mins "$EXIT_DURATION"
    --train-tokens "$TRAIN_TOKENS")
either "--train-iters --train-samples" --train-iters "$TRAIN_ITERS"
either "--lr-decay-iters --lr-decay-samples --lr-decay-tokens" --lr-decay-tokens "$LR_DECAY_TOKENS"
either "--lr-warmup-iters --lr-warmup-samples --lr-warmup-tokens --lr-warmup-fraction" \
    --lr-warmup-iters "$LR_WARMUP_ITERS"
train pretrain_bert.py "${OPTIONS[@]}" "${REST[@]}"
