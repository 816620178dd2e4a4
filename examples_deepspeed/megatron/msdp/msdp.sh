#!/usr/bin/env bash
# What the scripts of this folder share. Not run by itself.
source "$(dirname "${BASH_SOURCE[0]}")/../megatron.sh"

# shellcheck disable=SC2034 # data_processing.sh reads woi
wow=${WOW_DATA_FOLDER:-data/wizard_of_wikipedia} woi=${WOI_DATA_FOLDER:-data/wizard_of_internet}

preprocess() { # --func NAME ...
    (run python tasks/msdp/preprocessing.py "$@")
}

# A GPT of 357 million weights.
msdp() { # PROCESSES --flag value ...
    local GPUS=${GPUS:-$1} LAUNCHER=${LAUNCHER:-torchrun}
    start tasks/msdp/main.py --num-layers 24 --hidden-size 1024 \
        --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "${@:2}"
}

prompt() { # TYPE EXAMPLES PROMPTS OUTPUT --flag value ...
    msdp 8 --task MSDP-PROMPT --micro-batch-size 1 --vocab-file "${VOCAB_PATH:-${VOCAB_FILE:-gpt2-vocab.json}}" \
        --merge-file "${MERGE_PATH:-${MERGE_FILE:-gpt2-merges.txt}}" --load "${CHECKPOINT_PATH:-checkpoints/gpt_357m}" \
        --fp16 --DDP-impl torch --tokenizer-type GPT2BPETokenizer \
        --sample-input-file "${INPUT_PATH:-$wow/testseen_processed.txt}" \
        --sample-output-file "${OUTPUT_PATH:-$wow/$4}" --prompt-file "${PROMPT_PATH:-$wow/$3}" \
        --prompt-type "$1" --num-prompt-examples "$2" "${@:5}"
}

f1() { # ANSWERS --flag value ...
    (msdp 1 --task MSDP-EVAL-F1 --micro-batch-size 4 --guess-file "$MODEL_GEN_PATH" \
        --answer-file "$1" "${@:2}")
}
