#!/usr/bin/env bash
# The Llama of Megatron-DeepSpeed's examples: 24 layers of width 2048, 250,000 steps of 32 samples.
# Not run by itself; sourced after common.sh:
#
#     LLAMA_RUN    the flags of model, length and schedule
#     pretrain_llama --flag value ... "$@"    on 8 processes, as pretrain_llama*_distributed.sh do
#
# Settings, from the environment, next to those of common.sh: those below,
# activation_checkpoint=true, and
#
#     TP PP             2 2
#     ZERO_STAGE        0
#     BASE_PATH         folder (tmp) of data/bookcorpus_train_1m_text_sentence and tokenizer.model,
#                       where DATA_PATH and TOKENIZER_PATH are not set
#     TOKENIZER_PATH    Llama's tokenizer.model; a TOKENIZER, or VOCAB_FILE and MERGE_FILE, comes first
#     CHECKPOINT_PATH   folder of the checkpoints (BASE_PATH)

: "${HIDDEN_SIZE:=2048}" "${FFN_HIDDEN_SIZE:=5504}" "${NUM_LAYERS:=24}" "${NUM_HEADS:=16}"
: "${SEQ_LENGTH:=${SEQ:-2048}}" "${GLOBAL_BATCH_SIZE:=${GLOBAL_BATCH:-32}}"
: "${TRAIN_STEPS:=${TRAIN_ITERS:-250000}}" "${LR:=3e-4}" "${MIN_LR:=3e-5}"
: "${LR_WARMUP_STEPS:=2000}" "${WEIGHT_DECAY:=0.1}" "${GRAD_CLIP:=1}"

# shellcheck disable=SC2206 # LLAMA, of common.sh, is meant to be split into words
LLAMA_RUN=($LLAMA --no-query-key-layer-scaling --num-layers "$NUM_LAYERS"
    --hidden-size "$HIDDEN_SIZE" --ffn-hidden-size "$FFN_HIDDEN_SIZE"
    --num-attention-heads "$NUM_HEADS" --seq-length "$SEQ_LENGTH"
    --max-position-embeddings "$SEQ_LENGTH" --global-batch-size "$GLOBAL_BATCH_SIZE"
    --train-iters "$TRAIN_STEPS" --split "949,50,1" --lr "$LR" --min-lr "$MIN_LR"
    --lr-decay-style cosine --lr-warmup-iters "$LR_WARMUP_STEPS" --weight-decay "$WEIGHT_DECAY"
    --clip-grad "$GRAD_CLIP" --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1)
if [[ ${activation_checkpoint:-false} == true ]]; then
    LLAMA_RUN+=(--deepspeed-activation-checkpointing --recompute-granularity full
        --recompute-method uniform)
fi

# Adds the flags of the tokenizer to FLAGS.
llama_tokenizer() {
    if [[ -n ${TOKENIZER:-} || -n ${VOCAB_FILE:-} && -n ${MERGE_FILE:-} ]]; then
        tokenizer
    else
        FLAGS+=(--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model "$TOKENIZER_PATH")
    fi
}

pretrain_llama() {
    local base=${BASE_PATH:-tmp} FLAGS=() LAUNCHER=${LAUNCHER:-torchrun} stage=${ZERO_STAGE:-0}
    local GPUS=${GPUS:-${GPUS_PER_NODE:-8}} NODES=${NODES:-${NNODES:-1}}
    local TOKENIZER_PATH=${TOKENIZER_PATH:-$base/tokenizer.model} save=${CHECKPOINT_PATH:-$base}
    DATA_PATH=${DATA_PATH:-${DATASET:-1 ${DATASET_1:-$base/data/bookcorpus_train_1m_text_sentence}}}
    data
    llama_tokenizer
    start pretrain_gpt.py "${LLAMA_RUN[@]}" --tensor-model-parallel-size "${TP:-2}" \
        --pipeline-model-parallel-size "${PP:-2}" --micro-batch-size "${MICRO_BATCH_SIZE:-4}" \
        --deepspeed --zero-stage "$stage" --deepspeed_config "deepspeed_configs/ds_zero$stage.json" \
        --bf16 "${FLAGS[@]}" --save "$save" --load "$save" --save-interval 10000 \
        --eval-interval 1000 --eval-iters 10 "$@"
}
