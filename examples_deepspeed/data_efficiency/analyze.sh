#!/usr/bin/env bash
# What the scripts of this folder that analyse data share. Not run by itself:
#
#     source "$(dirname "$0")/../analyze.sh"
#     analyze GPT|BERT map|reduce "$@"    arguments: of a map [WORKER_ID], then flags
#
# Settings, from the environment (METRIC=vocab_rarity or metric=vocab_rarity), and their defaults:
#
#     METRIC       total_vocab_freq; after it vocab_rarity, of BERT also seqlen, seqlen_vocab_rarity
#     NUM_WORKERS, WORKER_ID    1, 0: machines that share the samples, and which of them this is
#     NUM_THREADS, NUM_THREADS_REDUCE    40, 40
#     NUM_EPOCHS   1 of GPT, whose epochs have the same samples; 5 of BERT, whose epochs differ
#     SEQ_LEN, BATCH_SIZE    2048 of GPT, 512 of BERT; 10000
#     SAVE_PATH    folder of the results: output/analysis_pile_..., next to the script
#     DATA_PATH    or DATA_HOME (dataset), where it is pile_text_document, of BERT
#                  pile_bert_train_text_sentence
#     VOCAB_FILE, MERGE_FILE    (or VOCAB_PATH, MERGE_PATH) the vocabulary, in dataset
#     DRY_RUN=1    print the command, do not run it
#
# A flag after the arguments counts instead of the script's. The output is also in the folder of the
# results, in a file .log for each step and worker.

# shellcheck source=/dev/null
source "$(dirname "${BASH_SOURCE[0]}")/../megatron_deepspeed.sh"

analyze() { # GPT|BERT map|reduce ARGUMENT ...
    local type=$1 family=${1,,} task=$2 FLAGS=() job
    shift 2
    defaults NUM_WORKERS=1 NUM_THREADS=40 METRIC=total_vocab_freq BATCH_SIZE=10000
    if [[ $type == GPT ]]; then
        defaults NUM_EPOCHS=1 SEQ_LEN=2048
        FLAGS+=(--tokenizer-type GPT2BPETokenizer)
        mds_data gpt pile_text_document
    else
        defaults NUM_EPOCHS=5 SEQ_LEN=512
        FLAGS+=(--tokenizer-type BertWordPieceLowerCase)
        mds_data bert pile_bert_train_text_sentence
    fi
    defaults SAVE_PATH="$HERE/output/analysis_pile_${family}_${NUM_EPOCHS}epoch"
    job=$family-pile-analyzing-$METRIC-${NUM_EPOCHS}epoch-$task
    if [[ $task == map ]]; then
        defaults WORKER_ID=0
        if [[ $# -gt 0 && $1 != --* ]]; then
            WORKER_ID=$1
            shift
        fi
        job+=-worker$WORKER_ID
        FLAGS+=(--analyzing-worker-id "$WORKER_ID")
    else
        defaults NUM_THREADS_REDUCE=40
        FLAGS+=(--analyzing-num-threads-reduce "$NUM_THREADS_REDUCE")
    fi
    if [[ -z ${DRY_RUN:-} ]]; then
        mkdir -p "$SAVE_PATH"
        exec > >(tee -i "$SAVE_PATH/$job.log") 2>&1
    fi
    LAUNCHER=python start examples_deepspeed/data_efficiency/analyze_data.py --analyzing-task "$task" \
        --analyzing-data-type "$type" --analyzing-metric "$METRIC" \
        --analyzing-num-workers "$NUM_WORKERS" --analyzing-num-threads "$NUM_THREADS" \
        --data-impl mmap --micro-batch-size "$BATCH_SIZE" --global-batch-size "$BATCH_SIZE" \
        --seq-length "$SEQ_LEN" --max-position-embeddings "$SEQ_LEN" --num-layers 1 \
        --hidden-size 1 --num-attention-heads 1 --split 949,50,1 --distributed-backend gloo \
        --train-data-exact-num-epochs "$NUM_EPOCHS" --return-data-index --save-interval 1 \
        --save "$SAVE_PATH" "${FLAGS[@]}" "$@"
}
