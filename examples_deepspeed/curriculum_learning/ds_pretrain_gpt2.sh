#!/usr/bin/env bash
# GPT-2 with samples that grow, or without. The positions, before any flags:
#
#     CONFIG TAG MODEL_SIZE(117|345|774|1558) LR BATCH_SIZE SEQ_LEN MP_SIZE SEED SAVE_INTERVAL NUM_ITER
#     NUM_TOKEN LR_DECAY_TOKEN LR_WARMUP_ITER CONFIG_TEMPLATE CURRICULUM_STEP CURRICULUM_MIN
#
# CONFIG names ds_zero_stage_1_config_CONFIG.json; CONFIG_TEMPLATE true puts the last two into it. A
# variable of the environment or a flag comes before a position.
source "$(dirname "$0")/../megatron_deepspeed.sh"

(($# >= 16)) || fail "$# positions; 16 are needed, from CONFIG to CURRICULUM_MIN"
declare -A GPT2=([117]="12 768 12" [345]="24 1024 16" [774]="36 1280 20" [1558]="48 1600 25")
read -ra shape <<<"${GPT2[$3]:-}"
((${#shape[@]})) || fail "MODEL_SIZE $3 is not one of 117, 345, 774, 1558"
defaults NUM_LAYERS="${shape[0]}" HIDDEN_SIZE="${shape[1]}" NUM_ATTN_HEADS="${shape[2]}" LR="$4" \
    GLOBAL_BATCH_SIZE="$5" SEQ_LEN="$6" MP_SIZE="$7" SEED="$8" SAVE_INTERVAL="$9" NUM_ITER="${10}" \
    NUM_TOKEN="${11}" LR_DECAY_TOKEN="${12}" LR_WARMUP_ITER="${13}" CURRICULUM_STEP="${15}" \
    CURRICULUM_MIN="${16}" PP_SIZE=1 ZERO_STAGE=1 NUM_NODE="${NUM_WORKERS:-}" LOG_INTERVAL=100 \
    EVAL_INTERVAL=100 EVAL_ITERS=10 MIN_LR=1.0e-5 NO_PP=false ACTIVATION_CHECKPOINT=true \
    LOG_OPTIMIZER_STATE=false LR_DECAY_STYLE=cosine SPLIT=949,50,1 WEIGHT_DECAY=1e-2 \
    NUM_WORKERS_OF_DATA=2
processes 128
defaults BATCH_SIZE=$((GLOBAL_BATCH_SIZE * PP_SIZE * MP_SIZE / NUM_GPUS)) \
    JOB_NAME="gpt2_$3M_bsz${GLOBAL_BATCH_SIZE}_seq${SEQ_LEN}_lr${LR}_warmup${LR_WARMUP_ITER}_seed${SEED}_$2_g${NUM_GPUS}_mp$MP_SIZE"
folders
FLAGS=()
mds_data gpt my-gpt2_text_document
if [[ ${14} == true ]]; then
    deepspeed_flags "$HERE/ds_zero_stage_1_config_$1.json" CONFIG_CL_MIN="$CURRICULUM_MIN" \
        CONFIG_CL_MAX="$SEQ_LEN" CONFIG_CL_DURATION="$CURRICULUM_STEP"
else
    deepspeed_flags "$HERE/ds_zero_stage_1_config_$1.json"
fi
pretraining_flags
FLAGS+=(--no-masked-softmax-fusion --train-tokens "$NUM_TOKEN")
either "--train-iters --train-samples" --train-iters "$NUM_ITER"
either "--lr-decay-iters --lr-decay-samples --lr-decay-tokens" --lr-decay-tokens "$LR_DECAY_TOKEN"
either "--lr-warmup-iters --lr-warmup-samples --lr-warmup-tokens --lr-warmup-fraction" \
    --lr-warmup-iters "$LR_WARMUP_ITER"
train pretrain_gpt.py "${@:17}"
