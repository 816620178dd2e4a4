#!/usr/bin/env bash
# Makes database, index and neighbours of a Retro project, or the stages in RETRO_TASKS. The same
# command continues where it was stopped. The settings are those of get_preprocess_cmd.sh:
#
#     DATA_PATH=data/corpus_text_document VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt \
#         tools/retro/examples/preprocess_data.sh [FLAG ...]
source "$(dirname "$0")/get_preprocess_cmd.sh"

get_preprocess_cmd "$@"
run "${PREPROCESS_CMD[@]}"
