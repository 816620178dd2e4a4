#!/usr/bin/env bash
# What the scripts of this folder share: the model, and Megatron-DeepSpeed's folders. Not run by itself:
#
#     source "$(dirname "$0")/universal.sh"
#     save_run bf16 "$@"       200 steps; DeepSpeed's folders at steps 100 and 200
#     resume_run bf16 "$@"     the same from the universal checkpoint of a run of another layout
#
# Settings, from the environment, beside those of ../common.sh:
#
#     TP PP DP          this run's layout (2 2 2 to save, 2 2 1 to resume)
#     LOAD_TP LOAD_PP LOAD_DP    the layout of the run to resume from (2 2 2)
#     ZERO_STAGE        1 (default), or 2 or 3 with PP=1 LOAD_PP=1
#     GLOBAL_BATCH      samples per step (16); the loss continues if both runs have the same
#     DEBUG_MODE        1 (default): 4 layers of width 512; 0: GPT with 345 million weights
#     BASE_DATA_PATH    folder (dataset) of my-gpt2_text_document.bin and .idx, gpt2-vocab.json and
#                       gpt2-merges.txt, where DATA_PATH, VOCAB_FILE and MERGE_FILE are not set

# shellcheck disable=SC2034 # for common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

ZERO_STAGE=${ZERO_STAGE:-1}
EXPERIMENT=${RUNS:+$RUNS/}z${ZERO_STAGE}_uni_ckpt
DATA_PATH=${DATA_PATH:-${BASE_DATA_PATH:-dataset}/my-gpt2_text_document}
VOCAB_FILE=${VOCAB_FILE:-${BASE_DATA_PATH:-dataset}/gpt2-vocab.json}
MERGE_FILE=${MERGE_FILE:-${BASE_DATA_PATH:-dataset}/gpt2-merges.txt}

size=toy shape="--num-layers 4 --hidden-size 512 --num-attention-heads 32 --seq-length 512
    --max-position-embeddings 512"
[[ ${DEBUG_MODE:-1} == 1 ]] || size=big shape=${MODEL[gpt2-345m]}

# folder TYPE TP PP DP: the checkpoints of a run
folder() {
    echo "$EXPERIMENT/checkpoints/gpt2/z$ZERO_STAGE/$1/tp$2_pp$3_dp$4_sp1_$size"
}

save_run() {
    local DP=${DP:-2}
    train "$1" save --load "$(folder "$1" "${TP:-2}" "${PP:-2}" "$DP")" "${@:2}"
}

resume_run() {
    local DP=${DP:-1} from=("${LOAD_TP:-2}" "${LOAD_PP:-2}" "${LOAD_DP:-2}")
    train "$1" "uni_load${from[0]}_${from[1]}_${from[2]}_1" --universal-checkpoint \
        --load "$(folder "$1" "${from[@]}")" "${@:2}"
}

# train TYPE TAG FLAG ...
train() {
    local TP=${TP:-2} PP=${PP:-2} batch=${GLOBAL_BATCH:-16} FLAGS=()
    local processes=$((TP * PP * DP)) save
    local GPUS=${GPUS:-$processes} layout=tp${TP}_pp${PP}_dp${DP}_sp1
    save=$(folder "$1" "$TP" "$PP" "$DP")
    ((batch % processes == 0)) || fail "GLOBAL_BATCH $batch is no multiple of $processes processes"
    case $1 in
        bf16) FLAGS+=(--bf16) ;;
        fp16) FLAGS+=(--fp16 --initial-loss-scale 4096 --loss-scale-window 50) ;;
    esac
    ((ZERO_STAGE == 1)) || FLAGS+=(--no-pipeline-parallel)
    data
    vocabulary pretrain_gpt.py
    # shellcheck disable=SC2086
    start pretrain_gpt.py $shape --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" \
        --micro-batch-size $((batch / processes)) --global-batch-size "$batch" \
        --deepspeed --deepspeed_config "deepspeed_configs/ds_zero$ZERO_STAGE.json" "${FLAGS[@]}" \
        --checkpoint-format deepspeed --save "$save" --save-interval 100 --exit-interval 200 \
        --tensorboard-dir "$EXPERIMENT/tensorboard/$1/${layout}_gbsz${batch}_z${ZERO_STAGE}_${size}_$2" \
        --split 98,2,0 --train-iters 1000 --lr 6.0e-3 --min-lr 6.0e-4 --lr-decay-style cosine \
        --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 \
        --init-method-std 0.006 --make-vocab-size-divisible-by 256 --checkpoint-activations \
        --log-interval 1 --eval-interval 10 --eval-iters 40 "${@:3}"
}
