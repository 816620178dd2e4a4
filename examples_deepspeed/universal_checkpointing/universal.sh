#!/usr/bin/env bash
# What the scripts of this folder share, Megatron-DeepSpeed's names and folders. Not run by itself:
#
#     source "$(dirname "$0")/universal.sh"
#     train bf16 save FLAG ... "$@"               a run that saves DeepSpeed's folders
#     resume bf16 FLAG ... "$@"                   a run from a universal checkpoint of another layout
#
# Settings, from the environment, beside those of ../common.sh:
#
#     TP PP DP       the layout; LOAD_TP LOAD_PP LOAD_DP that of the run to resume from (2 2 2)
#     ZERO_STAGE     1 (default), 2 or 3; above 1 without a pipeline
#     GLOBAL_BATCH   samples per step (16); the loss continues only where it is the same
#     DEBUG_MODE     1 (default): 4 layers of 512; 0: GPT with 345 million weights
#     BASE_DATA_PATH    folder of my-gpt2_text_document.{bin,idx}, gpt2-vocab.json, gpt2-merges.txt
#                    (dataset), where DATA_PATH, VOCAB_FILE and MERGE_FILE are not set

source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

ZERO_STAGE=${ZERO_STAGE:-1}
EXP_DIR=z${ZERO_STAGE}_uni_ckpt
[[ $ZERO_STAGE == [123] ]] || fail "ZERO_STAGE $ZERO_STAGE: 1, 2 or 3"

size=toy shape="--num-layers 4 --hidden-size 512 --num-attention-heads 32 --seq-length 512
    --max-position-embeddings 512"
[[ ${DEBUG_MODE:-1} == 1 ]] || size=big shape=${MODEL[gpt2-345m]}

# checkpoints TYPE TP PP DP: the folder of a run of that layout
checkpoints() {
    echo "$EXP_DIR/checkpoints/gpt2/z$ZERO_STAGE/$1/tp$2_pp$3_dp$4_sp1_$size"
}

# train TYPE TAG FLAG ...: 200 steps with a checkpoint at 100 and 200
train() {
    local folder world=$((TP * PP * DP)) batch=${GLOBAL_BATCH:-16}
    local data=${BASE_DATA_PATH:-dataset} precision=(--bf16)
    local log=$EXP_DIR/tensorboard/$1/tp${TP}_pp${PP}_dp${DP}_sp1_gbsz${batch}_z${ZERO_STAGE}_${size}_$2
    local GPUS=${GPUS:-$world} FLAGS=() CHECKPOINT_PATH
    CHECKPOINT_PATH=$(checkpoints "$1" "$TP" "$PP" "$DP")
    ((batch % world == 0)) || fail "GLOBAL_BATCH $batch is not a multiple of $world processes"
    DATA_PATH=${DATA_PATH:-$data/my-gpt2_text_document}
    VOCAB_FILE=${VOCAB_FILE:-$data/gpt2-vocab.json} MERGE_FILE=${MERGE_FILE:-$data/gpt2-merges.txt}
    [[ $1 == bf16 ]] || precision=(--fp16 --initial-loss-scale 4096 --loss-scale-window 50)
    ((PP > 1)) || precision+=(--no-pipeline-parallel)
}
