#!/bin/bash
GPUS=8; TP=2; CP=2
ARGS="--tensor-model-parallel-size $TP --context-parallel-size $CP --pipeline-model-parallel-size 1"
ARGS="$ARGS --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
ARGS+=" --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 --ffn-hidden-size 14336"
ARGS+=" --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --swiglu --normalization RMSNorm --norm-epsilon 1e-05 --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
ARGS+=" --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1"
ARGS+=" --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather"
ARGS+=" --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B --data-path ${DATA:-my_text_document} --split 99,1,0 --data-cache-path cache --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1"
ARGS+=" --ckpt-format torch_dist --dist-ckpt-strictness log_all --save out --load out --save-interval 1000 --distributed-timeout-minutes 60 --exit-duration-in-mins 230 --log-throughput --tensorboard-dir tb --attention-backend fused --yarn-scaling-factor 4"
CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc_per_node $GPUS --nnodes 1 pretrain_gpt.py $ARGS 2>&1 | tee log.txt
