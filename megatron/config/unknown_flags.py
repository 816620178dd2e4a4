"""What to say of a flag that a program does not have: what to use instead of one of Megatron-LM or
Megatron-DeepSpeed that means nothing here, or whose flag it is."""

from __future__ import annotations

import re
from collections.abc import Container
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from megatron.config.command_line import FlagParser
from megatron.config.run import FLAG_CLASSES

NETWORKS = {
    "--num-experts-switch --num-local-experts --moe-* "
    "--expert-interval --expert-parallel --expert-*-parallel-size --expert-tensor-parallel-* "
    "--use-tutel --create-moe-param-group --disable-moe-* --enable-expert-tensor-parallelism "
    "--overlap-moe-* --overlap-dispatch-* --ep-overlap-* --use-grouped-gemm-* "
    "--high-priority-a2a-comm-stream --save-tokens-per-expert-interval": (
        "there is no mixture of experts; leave it out to train a dense model"
    ),
    "--num-classes --img-h --img-w --num-channels --patch-dim --classes-fraction "
    "--data-per-class-fraction --no-data-sharding --head-lr-mult --vision-* --swin-* --dino-* "
    "--mask-type --mask-factor --iter-per-epoch": "there are no vision models",
    "--ict-* --biencoder-* --titles-data-path --query-in-block-prob "
    "--use-one-sent-docs --evidence-data-path --retriever-* --block-data-path --embedding-path "
    "--indexer-*": "there are no models for retrieval (ICT, REALM, ORQA)",
    "--logits-load-* --logits-save-*": (
        "--kd with --load-teacher trains a student; --kd-cache keeps the teacher's logits on disk"
    ),
    "--multi-latent-attention --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim "
    "--v-head-dim --rotary-scaling-factor --mscale --mscale-all-dim --cache-mla-latents "
    "--mla-*": "there is no multi-latent attention; --num-query-groups makes keys and values fewer",
    "--is-hybrid-model --mamba-* --hybrid-layer-pattern --hybrid-override-pattern "
    "--disable-mamba-mem-eff-path --linear-* --experimental-attention-variant --dsa-* "
    "--no-dsa-* --disable-dsa-*": (
        "all blocks have softmax attention; --sliding-window makes it local"
    ),
    "--mtp-*": "there is no multi-token prediction",
    "--heterogeneous-* --spec": "all blocks are alike; a new one is a family in megatron/families",
    "--mup-* --use-mup": "there is no muP; choose --lr and --init-method-std for the size",
    "--quick-geglu --glu-linear-offset --activation-func-clamp-value": (
        "the activations are gelu, --relu, --squared-relu, --swiglu and --glu-activation geglu"
    ),
    "--qk-l2-norm": "--qk-layernorm normalizes queries and keys",
    "--qk-clip --qk-clip-*": "--attn-logit-softcapping bounds attention scores",
    "--attention-output-gate --softmax-type": "attention is softmax attention without a gate",
    "--rotary-interleaved": "RoPE rotates the two halves of a head; a conversion reorders weights",
    "--rotary-seq-len-interpolation-factor": (
        'use --rope-scaling \'{"rope_type": "linear", "factor": N}\''
    ),
    "--yarn-* --no-yarn-* --rope-type": (
        'use --rope-scaling \'{"rope_type": "yarn", "factor": N}\' (all its parameters are keys)'
    ),
    "--mrope-section --no-rope-freq": "positions are those of --position-embedding-type",
    "--window-size": "use --sliding-window N+1 for a window of N tokens before each token",
    "--init-method-xavier-uniform --embedding-init-method-std": (
        "all weights start from the normal distribution of --init-method-std"
    ),
    "--data-parallel-random-init": "data-parallel ranks always start with equal weights",
    "--padded-vocab-size --no-pad-vocab-size --disable-pad-vocab-size": (
        "the vocabulary is padded to --make-vocab-size-divisible-by; 1 adds no rows"
    ),
}
"""Names and patterns of other trainers' flags that describe networks, and what to use instead."""

REFUSED = NETWORKS | {
    # Precision.
    "--fp8-e4m3": "use --fp8-format e4m3",
    "--fp8-hybrid": "use --fp8-format hybrid",
    "--no-fp8-wgrad --disable-fp8-wgrad --fp8-output-proj --fp8-quantizer-factory "
    "--fp8-param-gather --fp4-* --te-precision-config-file --use-kitchen-attention "
    "--kitchen-* --reuse-grad-buf-for-mxfp8-param-ag --keep-fp8-transpose-cache": (
        "--fp8-format and --fp8-recipe say what is computed in 8 bits; weights stay in bfloat16, "
        "beside 8-bit copies in both layouts"
    ),
    "--fp32-residual-connection": (
        "hidden states have the dtype of --bf16 or --fp16; --bf16 --zero-stage 0 runs as autocast, "
        "with float32 weights"
    ),
    "--disable-bf16-reduced-precision-matmul": (
        "products of bfloat16 add up as torch's default says; without --bf16 they are in float32"
    ),
    "--grad-reduce-in-bf16 --ddp-reduce-scatter-with-fp32-accumulation --ddp-param-name-*": (
        '"communication_data_type" in the DeepSpeed JSON is the dtype of reduced gradients'
    ),
    "--main-grads-dtype": (
        "gradients are summed in the dtype of the weights, or in float32 with "
        "--accumulate-allreduce-grads-in-fp32"
    ),
    # Layouts.
    "--cp-comm-type --hierarchical-context-parallel-sizes "
    "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank --ds-sequence-parallel-fpdt* "
    "--force-ds-sequence-parallel": (
        "--sequence-parallel splits activations along the sequence, over the tensor-parallel ranks"
    ),
    "--tensor-parallel-num-weight-shards": "use --tensor-model-parallel-size",
    "--enable-zbh1-*": "--pipeline-schedule dualpipev has almost no idle time",
    "--standalone-embedding-stage --account-for-* --decoder-first-pipeline-num-layers "
    "--decoder-last-pipeline-num-layers --pipeline-model-parallel-layout --mtp-standalone": (
        "--pipeline-partition gives the number of blocks of each stage"
    ),
    "--pipeline-model-parallel-comm-backend": "--distributed-backend is that of all collectives",
    "--use-tp-pp-dp-mapping": "the order of the ranks is fixed: pipeline, data, tensor",
    "--fake-process-group": "tools/plan.py predicts a layout without its processes",
    "--use-megatron-fsdp --use-torch-fsdp2 --torch-fsdp2-* --fsdp-* --megatron-fsdp-* "
    "--data-parallel-sharding-strategy --outer-dp-sharding-strategy "
    "--enable-full-sharding-in-hsdp --num-distributed-optimizer-instances "
    "--suggested-communication-unit-size --init-model-with-meta-device": (
        "--zero-stage 3 divides weights over data-parallel ranks"
    ),
    "--cpu-optimizer --optimizer-cpu-offload --optimizer-offload-fraction "
    "--overlap-cpu-optimizer-d2h-h2d --use-torch-optimizer-for-cpu-offload": (
        'use "offload_optimizer": {"device": "cpu"} of zero_optimization in the DeepSpeed JSON'
    ),
    "--memory-centric-tiled-linear --tile-factor": (
        "--tensor-model-parallel-size divides the weights of a layer"
    ),
    "--cpu-offloading-* --fine-grained-* --offload-modules --min-offloaded-tensor-size "
    "--delay-offload-until-cuda-graph --delta-offload-* --activation-offload-fraction "
    "--scattered-embeddings --split-transformers --recompute-modules --mlp-chunks-for-training": (
        "--recompute-granularity selective or full keeps fewer activations, and "
        "--sequence-parallel divides them"
    ),
    "--enable-cuda-graph --external-cuda-graph --cuda-graph-* --optimizer-cuda-graph "
    "--inference-cuda-graph-scope": (
        "--torch-compile --torch-compile-mode reduce-overhead uses CUDA graphs"
    ),
    # Optimizers and schedules.
    "--muon-* --lion-* --dump-param-to-param-group-map": "--optimizer is adam or sgd",
    "--decoupled-lr --decoupled-min-lr": "all weights have the learning rate --lr",
    "--apply-wd-to-qk-layernorm --no-weight-decay-cond-type": (
        "weight matrices are decayed, biases and norms are not"
    ),
    "--freeze-all-layers": "all weights are trained; --skip-train evaluates only",
    "--step-batch-size-schedule": "--rampup-batch-size raises the batch size",
    "--decrease-batch-size-if-needed": "give a --global-batch-size that the processes can divide",
    "--phase-transition-iterations": (
        "stop with --exit-interval and continue with other flags at --load"
    ),
    "--calculate-per-token-loss": "the loss of a batch is the mean of its micro batches",
    "--random-ltd": 'every block sees all tokens; "data_efficiency" in the DeepSpeed JSON has '
    "curricula",
    "--check-for-spiky-loss --check-for-large-grads": (
        "every run does, by --spike-sigma; --on-spike says what happens then"
    ),
    "--iterations-to-skip": (
        "--skip-samples FIRST:LAST skips training samples, --on-spike rollback those of spikes"
    ),
    # Data and tokenizers.
    "--sample-rate": "WEIGHT PREFIX WEIGHT PREFIX ... in --data-path says how often each is used",
    "--aml-data-download-path": "give whole paths in --data-path",
    "--use-dataset-only": "tools/show_batch.py reads data without a model",
    "--per-dataset-sequences-path --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap "
    "--mid-level-dataset-surplus": (
        "tools/build_index.py builds the sample indices before a run, in --data-cache-path"
    ),
    "--dataloader-inter-document-masking": "use --reset-attention-mask",
    "--allow-ambiguous-pad-tokens": "only samples of --sft are padded, and the loss ignores that",
    "--tokenizer-metadata --tokenizer-special-tokens --tokenizer-sentencepiece-legacy "
    "--no-tokenizer-sentencepiece-* --disable-tokenizer-sentencepiece-* --tokenizer-hf-* "
    "--null-tokenizer-*": "a tokenizer is what its files say; see --tokenizer-type",
    "--full-validation": (
        "--eval-iters is the number of global batches of an evaluation: samples / "
        "--global-batch-size for the whole of a set"
    ),
    "--eval-global-batch-size --eval-micro-batch-size": (
        "evaluation uses --global-batch-size and --micro-batch-size"
    ),
    "--start-eval-at-iter": "the first evaluation is after --eval-interval iterations",
    "--test-mode": "use --mock-data for a run without data",
    # Checkpoints.
    "--ckpt-format --use-dist-ckpt --dist-ckpt-format": "use --checkpoint-format",
    "--ckpt-convert-*": "tools/convert_checkpoint.py converts checkpoints",
    "--ckpt-step": "use --load-tag NAME, such as global_step100",
    "--override-ckpt-iteration": (
        "--finetune loads the weights, without the optimizer state, and starts at iteration 0"
    ),
    "--save-params-interval --save-activations-interval --save-wgrads-interval "
    "--save-dgrads-interval": "tools/inspect_checkpoint.py reads the weights of a checkpoint",
    "--save-retain-interval": "use --keep-last with --keep-every",
    "--load-main-params-from-ckpt": "--finetune loads weights without the state of the optimizer",
    "--non-persistent-*": "--save-interval with --keep-last keeps the newest checkpoints only",
    "--use-mp-args-from-checkpoint-args": (
        "a checkpoint loads in any layout; give --tensor-model-parallel-size and "
        "--pipeline-model-parallel-size"
    ),
    "--no-use-tokenizer-model-from-checkpoint-args "
    "--disable-use-tokenizer-model-from-checkpoint-args": (
        "flags of the tokenizer have precedence over --use-checkpoint-args"
    ),
    "--dist-ckpt-save-pre-mcore-014 --dist-ckpt-strictness --no-strict-fsdp-dtensor-load "
    "--disable-strict-fsdp-dtensor-load": "a checkpoint loads if nothing is missing or left over",
    # Running.
    "--lazy-mpu-init": "processes are set up by the program itself",
    "--inprocess-*timeout --inprocess-*interval --inprocess-*-wait --inprocess-*-time": (
        "--hang-seconds and --hang-limits say how long a rank may take; a rank that ends is "
        "noticed at once"
    ),
    "--inprocess-granularity --inprocess-active-world-size": (
        "--inprocess-restart starts all ranks again, and uses as many as the layout allows"
    ),
    "--inprocess-empty-cuda-cache": "--inprocess-restart starts new processes, without a cache",
    "--enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters": (
        "use --inprocess-restart, or torchrun --max-restarts; --hang-seconds finds ranks that hang"
    ),
    "--error-injection-* --fault-injector-* --rerun-mode --result-rejected-tracker-filename "
    "--gpu-sniff-test-interval": (
        "a run stops at losses and gradients that are not finite; tools/check_parity.py compares "
        "layouts"
    ),
    "--exit-signal": "a run always saves and exits on SIGTERM, SIGINT and SIGUSR1",
    "--batch-invariant-mode": (
        "--deterministic-mode repeats a run with the same batches bit for bit; there is no mode "
        "for other batches"
    ),
    "--yaml-cfg": "flags are given on the command line",
    "--run-workload-inspector-server --straggler-ctrlr-port --straggler-minmax-count "
    "--disable-straggler-on-startup": "tools/profile_step.py says where the time of a step goes",
    "--log-max-attention-logit --log-device-memory-used --log-memory-interval "
    "--log-params-std": "--log-memory-to-tensorboard and --metrics-file have what is measured",
    "--enable-one-logger --no-one-logger --one-logger-* --app-tag-run-* --enable-onelogger": (
        "metrics go to --metrics-file and to what --report-to names"
    ),
    "--pytorch-profiler-collect-* --record-shapes --nvtx-ranges": (
        "--profile records shapes, and NVTX ranges under nsys; --profile pt-full adds call stacks"
    ),
    "--flight-recorder-* --no-flight-recorder-* --disable-flight-recorder-*": (
        "collectives are recorded; TORCH_FR_BUFFER_SIZE in the environment says how many"
    ),
    "--distributed-timeout-seconds-after-init": "use --distributed-timeout-minutes",
    "--enable-experimental": "everything here is available without it",
    "--config-logger-dir": "--explain-config prints the configuration",
    "--onnx-safe": "models are exported by tools/convert_checkpoint.py to-hf",
    # Generation and reinforcement learning.
    "--ds-inference --inference --inference-* --no-inference-* --max-tokens-to-oom --flash-decode "
    "--use-legacy-static-engine --decode-only-cuda-graphs --enable-chunked-prefill "
    "--num-speculative-tokens --use-same-sampling-seed-across-dp-ranks --symmetric-ar-type "
    "--nccl-all-reduce-for-prefill --mlp-chunks-for-prefill": (
        "tools/run_text_generation_server.py serves a model and tools/generate.py writes texts, "
        "with flags of their own"
    ),
    "--bert-embedder-type --bert-load --output-bert-embeddings": (
        "tools/retro/preprocess_data.py embeds the chunks of a database with a BERT"
    ),
    "--retro-fix-sub-epoch --retro-split-constraint": (
        "the samples of --retro-project-dir are those of a GPT with its --retro-gpt-split"
    ),
    "--rl-* --no-rl-* --grpo-* --langrl-* --perform-rl-step --refit-method": (
        "there is no reinforcement learning; --sft trains on instructions"
    ),
}
"""The same of all their flags."""

OTHER_TRAINERS = Path(__file__).with_name("other_trainers.txt")
"""Names in transformers, axolotl, LLaMA-Factory, torchtitan, torchtune, NeMo, nanotron and others,
and the flags that mean the same here."""

TRAINING = "pretrain_gpt.py"

OWN_FLAGS = {
    "tools/preprocess_data.py": """--input --output-prefix --json-key --json-keys --jsonl-keys
        --chunk-size --split-sentences --keep-newlines --keep-sequential-samples --partitions
        --sentence-splitter --lang --input-format""",
    "tools/generate.py": """--prompt --prompt-file --max-new-tokens --greedy --temperature --top-k
        --top-p --num-samples --out-seq-length --top_k --top_p --genfile --sample-input-file
        --sample-output-file --recompute""",
    "tools/run_text_generation_server.py": "--port --host --api-key --served-model-name",
    "examples_deepspeed/megatron/detxoify_lm/finetune_gpt.py": "--data-path2 --eval-ppl",
    "tools/convert_checkpoint.py": """--architecture --push-to-hub --private --public
        --max-shard-size --release""",
    "tools/checkpoint/util.py": """--model-type --load-dir --save-dir --loader --saver
        --megatron-path --max-queue-size --true-vocab-size --target-tensor-parallel-size
        --target-pipeline-parallel-size --no-checking""",
    "tools/evaluate.py": """--tasks --include-path --num-fewshot --limit --use-cache --log-samples
        --gen-kwargs --apply-chat-template --system-instruction --fewshot-as-multiturn""",
    "tools/train_tokenizer.py": "--min-frequency --byte-fallback",
    "tools/analyze_data.py": """--analyzing-metric --analyzing-task --analyzing-data-type
        --analyzing-num-workers --analyzing-worker-id --analyzing-num-threads
        --analyzing-num-threads-reduce --analyzing-specific-threads""",
    "tools/check_parity.py": "--layouts",
    "tools/plan.py": "--gpus --gpus-per-node --gpu-memory --inter-node-bandwidth",
    "tools/show_batch.py": "--world-size",
    "tools/retro/preprocess_data.py": """--retro-tasks --retro-task-validate --retro-index-str
        --retro-index-type --retro-index-ntrain --retro-bert-vocab-file
        --retro-bert-tokenizer-type""",
    "tasks/main.py": "--task --overlapping-eval --strict-lambada --all-iterations",
    "scripts/run_gpt2_eval.py": "--model-path --cloze-eval --webtext-eval --load-openai",
}
"""Flags that people give to another program, by the program that has them."""

OF_2019 = {
    "--use-npy-data-loader --input-data-sizes-file": (
        "tools/preprocess_data.py makes indexed files for --data-path"
    ),
    "--eval-hf --pretrained-bert": "--load reads a folder of Hugging Face",
    "--max-num-samples --data-epochs": "--train-iters or --train-samples is the length of a run",
}
"""The same for flags of Megatron-LM's first releases."""

_PATTERNS = {
    pattern: reason for row, reason in (REFUSED | OF_2019).items() for pattern in row.split()
}


def instead_of(flag: str, prog: str, known: Container[str]) -> str | None:
    """Words about a flag that ``prog``, whose flags are ``known``, does not have; None if nothing
    is known of it."""
    instead = refused_flag(flag)
    if instead is not None:
        return f"is not supported here: {instead}"
    other = another_trainers(flag, known)
    return another_program(flag, prog) if other is None else f"is another trainer's name: {other}"


def another_trainers(name: str, known: Container[str]) -> str | None:
    """The flag that means what another trainer calls ``name``, as words; None for any other name.
    Only ``known`` flags are named."""
    name = name.lstrip("-+").replace("-", "_").lower()
    last = name.rpartition(".")[2]
    own = f"--{last.replace('_', '-')}"
    for key in dict.fromkeys((name, last)):
        for advice in _other_trainers().get(key, ()):
            first = re.search(r"--[a-z][\w-]*", advice)
            if first is None or first[0] in known:
                return advice
    return own if last != name and own in known else None


@cache
def _other_trainers() -> dict[str, list[str]]:
    advice: dict[str, list[str]] = {}
    for line in OTHER_TRAINERS.read_text().splitlines():
        names, colon, words = line.partition(": ")
        if colon and not line.startswith("#"):
            for name in names.split():
                advice.setdefault(name, []).append(words)
    return advice


def refused_flag(flag: str) -> str | None:
    """What to use instead of a flag of another trainer; None for any other flag."""
    exact = _PATTERNS.get(flag)
    if exact is not None:
        return exact
    return next((reason for p, reason in _PATTERNS.items() if fnmatchcase(flag, p)), None)


def another_program(flag: str, prog: str) -> str | None:
    """Says whose flag it is, if it belongs to another program than ``prog``."""
    for program, flags in OWN_FLAGS.items():
        if flag in flags.split() and not program.endswith(prog):
            return f"is a flag of {program}"
    training = set(FlagParser(*FLAG_CLASSES)._option_string_actions) - {"-h", "--help", "--version"}
    return f"is a flag of {TRAINING}" if flag in training else None
