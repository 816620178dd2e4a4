#!/usr/bin/env bash
# Megatron-DeepSpeed's example: a Llama 7B of Hugging Face, fine-tuned on Stanford Alpaca's
# instructions with 2 tensor-parallel ranks and a pipeline of 2 stages.
#
#     finetune_llama.sh convert_hf2mds    reads $HF_LLAMA_PATH, writes $MEGA_DS_LLAMA_PATH
#     finetune_llama.sh                   trains, saves in $FINETUNED_PATH
#     finetune_llama.sh convert_mds2hf    writes what was trained to $HF_LLAMA_PATH-hf-out
source "$(dirname "$0")/../common.sh"

EXAMPLE=examples_deepspeed/finetune_hf_llama
HF_LLAMA_PATH=${HF_LLAMA_PATH:-data/llama-2-7b-hf}
HF_LLAMA_PATH=${HF_LLAMA_PATH%/}
DATASET_PATH=${DATASET_PATH:-$EXAMPLE/alpaca_data.json}
TP=${TP:-2}
PP=${PP:-2}
MEGA_DS_LLAMA_PATH=${MEGA_DS_LLAMA_PATH:-./llama-7b-mega-ds-T${TP}P${PP}}
FINETUNED_PATH=${FINETUNED_PATH:-$MEGA_DS_LLAMA_PATH-finetuned}

CONVERT=(tools/hf2megads_weight_converter.py --hf-ckpt-num-shards 2 --hf-ckpt-dir "$HF_LLAMA_PATH"
    --load-mode auto)
DS_CONFIG=$EXAMPLE/ds_config_empty.json
case ${1:-} in
    convert_hf2mds)
        shift
        TASK=("${CONVERT[@]}" --save "$MEGA_DS_LLAMA_PATH")
        ;;
    convert_mds2hf)
        shift
        [[ -n ${DRY_RUN:-} || -d $FINETUNED_PATH ]] ||
            fail "$FINETUNED_PATH does not exist: train first, or set FINETUNED_PATH"
        TASK=("${CONVERT[@]}" --to-hf-ckpt --load "$FINETUNED_PATH" --save "$HF_LLAMA_PATH-hf-out")
        ;;
    *)
        TASK=(finetune_llama.py --load "$MEGA_DS_LLAMA_PATH" --save "$FINETUNED_PATH")
        DS_CONFIG=$EXAMPLE/ds_config.json
        ;;
esac

: "${NUM_LAYERS:=32}" "${HIDDEN_SIZE:=4096}" "${FFN_HIDDEN_SIZE:=11008}" "${NUM_HEADS:=32}"
: "${SEQ_LENGTH:=512}" "${MICRO_BATCH_SIZE:=16}" "${GLOBAL_BATCH_SIZE:=256}"
# The sizes have to be those of the weights.
start "${TASK[@]}" \
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" \
    --lr-warmup-iters 2000 --weight-decay 0.1 --clip-grad 1 \
    --num-layers "$NUM_LAYERS" --hidden-size "$HIDDEN_SIZE" \
    --num-attention-heads "$NUM_HEADS" --finetune --ffn-hidden-size "$FFN_HIDDEN_SIZE" --attention-dropout 0 \
    --hidden-dropout 0 --no-query-key-layer-scaling --disable-bias-linear --normalization rmsnorm \
    --use-rotary-position-embeddings --untie-embeddings-and-output-weights --swiglu \
    --seq-length "$SEQ_LENGTH" --max-position-embeddings "$SEQ_LENGTH" \
    --micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size "$GLOBAL_BATCH_SIZE" \
    --train-iters 3500 --lr 2e-5 --tensorboard-dir tensorboard_output --lr-decay-iters 320000 \
    --lr-decay-style cosine --log-interval 1 --eval-iters 100 --eval-interval 100 \
    --data-path "$DATASET_PATH" --save-interval 1500 --split 100,0,0 --bf16 --zero-stage 0 \
    --tokenizer-type HFTokenizer --tokenizer-model "$HF_LLAMA_PATH" \
    --deepspeed_config "$DS_CONFIG" --deepspeed --distributed-backend nccl --num-workers 0 \
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion \
    --no-gradient-accumulation-fusion --repeated-dataloader "$@"
