#!/usr/bin/env bash
# The command that makes the files of a Retro project. Run by itself it prints the command;
# preprocess_data.sh reads it and runs it:
#
#     get_preprocess_cmd --flag value ...    puts the words of the command into PREPROCESS_CMD
#
# Settings, from the environment, besides those of examples_deepspeed/common.sh (DATA_PATH,
# VOCAB_FILE, MERGE_FILE, TOKENIZER, LAUNCHER, GPUS, DRY_RUN):
#
#     RETRO_PROJECT_DIR    folder of the project (default: retro-project); or RETRO_WORKDIR, its older name
#     RETRO_TASKS          build (default), or db-build, index-train, index-add, query-neighbors
#     BERT_LOAD            checkpoint of a BERT, or folder of an encoder, that embeds chunks; without
#                          it words are hashed
#     BERT_EMBEDDER_TYPE   megatron (default with BERT_LOAD), huggingface or hashing
#     BERT_VOCAB_FILE      vocabulary of that BERT
source "$(dirname "${BASH_SOURCE[0]}")/../../../examples_deepspeed/common.sh"

RETRO_PROJECT_DIR=${RETRO_PROJECT_DIR:-${RETRO_WORKDIR:-retro-project}}

# Flags of the embedder.
embedder() {
    FLAGS+=(--bert-embedder-type
        "${BERT_EMBEDDER_TYPE:-$([[ -n ${BERT_LOAD:-} ]] && echo megatron || echo hashing)}")
    [[ -z ${BERT_LOAD:-} ]] || FLAGS+=(--bert-load "$BERT_LOAD")
    [[ -z ${BERT_VOCAB_FILE:-} ]] || FLAGS+=(--retro-bert-vocab-file "$BERT_VOCAB_FILE"
        --retro-bert-tokenizer-type BertWordPieceLowerCase)
}

get_preprocess_cmd() { # --flag value ...
    local FLAGS=() LAUNCH=() LAUNCHER=${LAUNCHER:-python}
    data
    tokenizer
    embedder
    launcher
    PREPROCESS_CMD=("${LAUNCH[@]}" tools/retro/preprocess_data.py
        --retro-project-dir "$RETRO_PROJECT_DIR" --retro-tasks "${RETRO_TASKS:-build}"
        "${FLAGS[@]}" --split "98,2,0" --seq-length 2048 --retro-gpt-chunk-length 64
        --train-samples 200000 --global-batch-size 256 --eval-interval 2000 --eval-iters 100 "$@")
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    DRY_RUN=1
    get_preprocess_cmd "$@"
    run "${PREPROCESS_CMD[@]}"
fi
