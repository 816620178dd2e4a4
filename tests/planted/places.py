"""Files that planted bugs are in, and the classes of bugs."""

TENSOR, CONTEXT_FILE = "parallel/tensor_parallel.py", "parallel/context.py"
LINEAR, LAYERS, MESH, SHARD = (f"parallel/{n}.py" for n in ("linear", "layers", "mesh", "shard"))
CROSS, SOFTMAX, HEAD = (f"parallel/{n}.py" for n in ("cross_entropy", "softmax_loss", "loss_head"))
EXECUTOR, MODULE, BACKEND = (
    f"engine/{n}.py" for n in ("pipeline_executor", "pipeline_module", "backend")
)
SCHEDULES, TIMELINE = "parallel/pipeline_schedules.py", "parallel/timeline.py"
COLLECTIVES, SHARED = "parallel/collectives.py", "engine/update/shared_gradients.py"
REDUCTION, ZERO = "engine/update/reduction.py", "engine/update/zero_optimizer.py"
OPTIMIZER, STATE, SAVING = "engine/update/optimizer.py", "engine/state.py", "engine/saving.py"
TRAIN, SLICES = "engine/train_engine.py", "checkpoint/slices.py"
EXCHANGE, EXPERTS = "features/experts/exchange.py", "features/experts/linear.py"
EXPERT_LOSS = BALANCE = "features/experts/balance.py"
RING, RING_ATTENTION, BLOCKS = (
    f"features/context/{n}.py" for n in ("exchange", "attention", "blocks")
)
NORM, LATENT = "model/norm.py", "features/latent/attention.py"
MASKED_HEADS = "features/masked/heads.py"
PARITY = "apps/parity/gradients.py"

MISSING, DOUBLE, SCALE, GROUP = "missing sum", "double sum", "wrong scale", "wrong group"
ORDER, OFFSET, RANKS, COUNT = "wrong order", "off by one", "swapped ranks", "counted twice"
LOST, RACE, CUT = "lost part", "read too early", "wrong cut"
PATCHES, ASYNC = "engine/deepspeed_patches.py", "engine/update/async_step.py"
PARTITION, ADAM = "engine/update/partition_update.py", "engine/update/adam.py"
FP16, LOADING = "engine/update/unpartitioned_fp16.py", "engine/loading.py"
READER, RANDOM, SAMPLER = "checkpoint/reader.py", "parallel/random.py", "data/sampler.py"
TRAINER, EVALUATION = "training/trainer.py", "features/evaluation/checkpoints.py"

STALE, SEED, FORMULA = "stale value", "unsynchronised random state", "wrong formula"
