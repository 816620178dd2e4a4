#!/bin/bash
#SBATCH -N 2
#SBATCH --gpus-per-node=8
DIR=/work/t5
run_cmd="python -u ${DIR}/pretrain_t5.py \
    --encoder-num-layers 12 --decoder-num-layers 12 \
    --hidden-size 768 --num-attention-heads 12 --kv-channels 64 --ffn-hidden-size 3072 \
    --encoder-seq-length 512 --decoder-seq-length 128 --max-position-embeddings 512 \
    --micro-batch-size 16 --global-batch-size 256 --lr 0.0001 --train-iters 100000 \
    --lr-decay-iters 100000 --lr-decay-style linear --min-lr 0.00001 --weight-decay 1e-2 \
    --lr-warmup-fraction .01 --clip-grad 1.0 --fp16 --vocab-extra-ids 100 \
    --data-path $DIR/data_text_sentence --vocab-file $DIR/bert-vocab.txt --tokenizer-type BertWordPieceCase \
    --split 949,50,1 --save $DIR/out --load $DIR/out"
srun -l --container-image nvcr.io/nvidia/pytorch:24.01-py3 sh -c "${run_cmd}"
