#!/usr/bin/env bash
# Megatron-LM's script: what a checkpoint writes without a prompt, to
# selfgeneration/unconditional_generation_NAME/SEED.out, NAME being the last part of CHECKPOINT.
#
#     selfgenerate-1.3b-unconditional.sh SAMPLES CHECKPOINT SEED [FLAG ...]
here=$(dirname "$0")/$(dirname "$(readlink "$0" || echo .)") # the script may be a link to this one
source "$here/../../megatron.sh"

(($# >= 3)) && [[ $1 =~ ^[0-9]+$ ]] || fail "give SAMPLES CHECKPOINT SEED, such as 1000 checkpoints 2333"
folder=selfgeneration/unconditional_generation_$(basename "$2")
[[ -n ${DRY_RUN:-} ]] || mkdir -p "$folder"
generate_samples --load "$2" --micro-batch-size 150 --out-seq-length 1000 --temperature 1.0 \
    --num-samples "$1" --top_p 0.9 --max-tokens-to-oom 1200000 --genfile "$folder/$3.out" \
    --seed "$3" "${@:4}"
