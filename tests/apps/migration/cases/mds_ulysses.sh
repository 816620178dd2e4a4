#!/bin/bash
sp_size=4
dir=$(pwd)
template_json="ds_config_template.json"
config_json="ds_config.json"
sed "s/GBSIZE/32/" ${template_json} | sed "s/MBSIZE/1/" > ${config_json}
deepspeed --num_gpus 8 ${dir}/pretrain_gpt.py --ds-sequence-parallel-size $sp_size --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 32768 --max-position-embeddings 32768 --micro-batch-size 1 --global-batch-size 32 --train-iters 500 --lr 1e-4 --use-flash-attn-v2 --bf16 --use-rotary-position-embeddings --rotary-percent 0.25 --normalization rmsnorm --swiglu --no-query-key-layer-scaling --attention-dropout 0 --hidden-dropout 0 --disable-bias-linear --untie-embeddings-and-output-weights --tokenizer-type HFTokenizer --tokenizer-name-or-path llama --data-path data_text_document --deepspeed --deepspeed_config ${config_json} --zero-stage 3 --no-pipeline-parallel --memory-centric-tiled-linear
