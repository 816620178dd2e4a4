#!/usr/bin/env bash
# Megatron-LM's script: top-k accuracy of a retriever on Natural Questions. EVIDENCE_DATA_DIR is a
# table of passages (id, text, title), EMBEDDING_PATH the file for their vectors, QA_FILE a table of
# questions and answers; DPR's files, which you have to supply.
source "$(dirname "$0")/megatron.sh"

retriever 1 tasks/main.py --task RETRIEVER-EVAL --micro-batch-size 128 \
    --recompute-granularity full --recompute-method uniform --seq-length 512 \
    --load "${CHECKPOINT_PATH:-checkpoints/retriever_nq}" \
    --evidence-data-path "${EVIDENCE_DATA_DIR:-data/psgs_w100.tsv}" \
    --embedding-path "${EMBEDDING_PATH:-data/embeddings.pkl}" \
    --qa-data-test "${QA_FILE:-data/nq-test.csv}" --faiss-use-gpu \
    --retriever-report-topk-accuracies 1 5 20 100 --indexer-log-interval 1000 \
    --indexer-batch-size 128 "$@"
