#!/usr/bin/env bash
# Megatron-LM's script: continues a checkpoint's training on DATA_PATH, with a constant learning
# rate, over 16 processes; it is evaluated on DATA_BLEND, what it was trained on before.
#
#     DATA_BLEND="0.3 PREFIX 0.7 PREFIX" \
#         finetune_gpt_distributed-1.3b.sh DATA_PATH OUTPUT LR BATCH ITERATIONS CHECKPOINT [FLAG ...]
here=$(dirname "$0")/$(dirname "$(readlink "$0" || echo .)") # the script may be a link to this one
source "$here/../megatron.sh"

(($# >= 6)) || fail "give DATA_PATH OUTPUT LR BATCH ITERATIONS CHECKPOINT"
[[ -n ${DATA_BLEND:-} ]] || fail "set DATA_BLEND to the data that the checkpoint was trained on"
read -ra blend <<<"$DATA_BLEND"
read -ra paths <<<"$1"
GPUS=${GPUS:-16} LAUNCHER=${LAUNCHER:-torchrun}
start examples_deepspeed/megatron/detxoify_lm/finetune_gpt.py --use-checkpoint-args --load "$6" \
    --save "$2" --data-path "${paths[@]}" --data-path2 "${blend[@]}" --micro-batch-size 4 \
    --global-batch-size "$4" --train-iters "$5" --split 100,0,0 --lr-decay-style constant \
    --lr "$3" --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --fp16 \
    --checkpoint-activations --log-interval 1 --save-interval 78 --eval-interval 78 \
    --eval-iters 50 --finetune --no-load-optim --tensorboard-dir "tensorboard/$(basename "$2")" \
    --log-validation-ppl-to-tensorboard "${@:7}"
