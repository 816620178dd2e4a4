#!/usr/bin/env bash
# What the scripts of megatron_gpt/ and llama/ share: models, and Megatron-DeepSpeed's folders. Not run
# by itself:
#
#     source "$(dirname "$0")/../universal.sh"
#     save_run bf16 "$@"       200 steps; DeepSpeed's folders at steps 100 and 200
#     resume_run bf16 "$@"     the same from the universal checkpoint of a run of another layout
#
# Settings, from the environment, next to those of ../common.sh:
#
#     TP PP DP SP       this run's layout (2 2 2 1 to save, 2 2 1 1 to resume)
#     LOAD_TP LOAD_PP LOAD_DP LOAD_SP    the layout of the run to resume from (2 2 2 1)
#     ZERO_STAGE        1 (default), or 2 or 3 with PP=1 LOAD_PP=1
#     GLOBAL_BATCH      samples per step (GPT 16, Llama 32); the loss continues if both runs have the
#                       same
#     DEBUG_MODE        1 (default): GPT with 4 layers of width 512, Llama for 200 steps; 0: GPT with
#                       345 million weights, Llama for all steps
#     LAYERS HIDDEN HEADS SEQ    the GPT's sizes; the Llama's are in ../llama.sh
#     TRAIN_ITERS, EXIT_INTERVAL, SAVE_INTERVAL, EVAL_INTERVAL, EVAL_ITERS, LR, MIN_LR
#     EXP_DIR           folder of checkpoints and TensorBoard (z1_uni_ckpt, in RUNS where that is set)
#     BASE_DATA_PATH    folder (dataset) of my-gpt2_text_document.bin and .idx, gpt2-vocab.json and
#                       gpt2-merges.txt, or llama-7b/tokenizer.model, where DATA_PATH, VOCAB_FILE and
#                       MERGE_FILE, or TOKENIZER_PATH, are not set

# shellcheck disable=SC2034 # for common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

ZERO_STAGE=${ZERO_STAGE:-1} SP=${SP:-1} FAMILY=${FAMILY:-gpt2}
EXPERIMENT=${EXP_DIR:-${RUNS:+$RUNS/}z${ZERO_STAGE}_uni_ckpt}
BASE_DATA_PATH=${BASE_DATA_PATH:-${BASE_PATH:-dataset}}
DATA_PATH=${DATA_PATH:-$BASE_DATA_PATH/my-gpt2_text_document}

size=toy
[[ ${DEBUG_MODE:-1} == 1 ]] || size=big
if [[ $FAMILY == llama ]]; then
    TOKENIZER_PATH=${TOKENIZER_PATH:-$BASE_DATA_PATH/llama-7b/tokenizer.model}
    source examples_deepspeed/llama.sh
    batch=$GLOBAL_BATCH_SIZE exit=200 boards=llama/
    [[ $size == toy ]] || exit=$TRAIN_STEPS
    MODEL_FLAGS=("${LLAMA_RUN[@]}")
else
    VOCAB_FILE=${VOCAB_FILE:-$BASE_DATA_PATH/gpt2-vocab.json}
    MERGE_FILE=${MERGE_FILE:-$BASE_DATA_PATH/gpt2-merges.txt}
    batch=${GLOBAL_BATCH:-16} exit=200 boards=''
    if [[ $size == toy ]]; then
        : "${LAYERS:=4}" "${HIDDEN:=512}" "${SEQ:=512}" "${HEADS:=32}"
    else
        : "${LAYERS:=24}" "${HIDDEN:=1024}" "${SEQ:=1024}" "${HEADS:=16}"
        exit=100
    fi
    MODEL_FLAGS=(--num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads "$HEADS"
        --seq-length "$SEQ" --max-position-embeddings "$SEQ" --global-batch-size "$batch" --train-iters "${TRAIN_ITERS:-1000}"
        --lr "${LR:-6.0e-3}" --min-lr "${MIN_LR:-6.0e-4}" --lr-decay-style cosine --weight-decay 0.1
        --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --split "98,2,0"
        --make-vocab-size-divisible-by 256 --checkpoint-activations --log-interval 1)
fi

# folder TYPE TP PP DP SP: the checkpoints of a run
folder() {
    echo "$EXPERIMENT/checkpoints/$FAMILY/z$ZERO_STAGE/$1/tp$2_pp$3_dp$4_sp$5_$size"
}

save_run() {
    local DP=${DP:-2}
    train "$1" save --load "$(folder "$1" "${TP:-2}" "${PP:-2}" "$DP" "$SP")" "${@:2}"
}

resume_run() {
    local DP=${DP:-1} from=("${LOAD_TP:-2}" "${LOAD_PP:-2}" "${LOAD_DP:-2}" "${LOAD_SP:-1}") tag
    printf -v tag '_%s' "${from[@]}"
    train "$1" "uni_load${tag#_}" --universal-checkpoint --load "$(folder "$1" "${from[@]}")" "${@:2}"
}

# train TYPE TAG FLAG ...
train() {
    local TP=${TP:-2} PP=${PP:-2} FLAGS=()
    local processes=$((TP * PP * DP * SP)) save
    local GPUS=${GPUS:-$processes} layout=tp${TP}_pp${PP}_dp${DP}_sp$SP
    save=$(folder "$1" "$TP" "$PP" "$DP" "$SP")
    ((batch % processes == 0)) || fail "GLOBAL_BATCH $batch is no multiple of $processes processes"
    case $1 in
        bf16) FLAGS+=(--bf16) ;;
        fp16) FLAGS+=(--fp16 --initial-loss-scale 4096 --loss-scale-window 50) ;;
    esac
    ((ZERO_STAGE == 1)) || FLAGS+=(--no-pipeline-parallel)
    data
    if [[ $FAMILY == llama ]]; then llama_tokenizer; else vocabulary gpt; fi
    start pretrain_gpt.py "${MODEL_FLAGS[@]}" --tensor-model-parallel-size "$TP" \
        --pipeline-model-parallel-size "$PP" --ds-sequence-parallel-size "$SP" \
        --micro-batch-size "${MICRO_BATCH:-$((batch / processes))}" --deepspeed --zero-stage "$ZERO_STAGE" \
        --deepspeed_config examples_deepspeed/universal_checkpointing/megatron_gpt/ds_config.json \
        "${FLAGS[@]}" --checkpoint-format deepspeed --save "$save" \
        --save-interval "${SAVE_INTERVAL:-100}" --exit-interval "${EXIT_INTERVAL:-$exit}" \
        --eval-interval "${EVAL_INTERVAL:-10}" --eval-iters "${EVAL_ITERS:-40}" \
        --tensorboard-dir "$EXPERIMENT/tensorboard/$boards$1/${layout}_gbsz${batch}_z${ZERO_STAGE}_${size}_$2" \
        "${@:3}"
}
