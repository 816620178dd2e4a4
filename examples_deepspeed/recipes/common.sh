#!/usr/bin/env bash
# What the recipes share. Not run by itself:
#
#     source "$(dirname "$0")/common.sh"
#     small=(--flag value ...)                        what SMALL=1 replaces, next to SMALL_SIZES
#     recipe FAMILY NAME --flag value ... -- "$@"     trains a gpt, bert or t5
#     recipe_of SCRIPT "$@"                           the same by another script of examples_deepspeed/
#
# SMALL=1 trains the recipe at the size of its curve, on a CPU. The other settings are those of
# ../common.sh.

source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

# Forty steps of 8 samples, at a rate that suits the width. Drawn wider, as so few steps would go into
# leaving the usual 0.02.
SMALL_SIZES=(--num-layers 2 --hidden-size 64 --num-attention-heads 4 --init-method-std 0.08
    --micro-batch-size 4 --global-batch-size 8 --train-iters 40 --lr 4e-3 --min-lr 4e-4
    --lr-warmup-iters 4 --log-interval 1 --eval-iters 0 --num-workers 0)
small=()

recipe() { # FAMILY NAME --flag value ... -- FLAGS OF THE CALLER
    local family=$1 name=$2 words=()
    shift 2
    while [[ $1 != -- ]]; do
        words+=("$1")
        shift
    done
    [[ -z ${SMALL:-} ]] || words+=("${SMALL_SIZES[@]}" "${small[@]}")
    pretrain_of "$family" "$name" "${words[@]}" "${@:2}"
}

recipe_of() { # SCRIPT FLAGS OF THE CALLER
    [[ -n ${SMALL:-} ]] || small=()
    exec "examples_deepspeed/$1" "${small[@]}" "${@:2}"
}
