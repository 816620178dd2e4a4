"""Imports all that a training run needs, and reads the help texts of its flags and the versions of
packages.

Processes that others are forked from import this module: what a fork does not do again takes a
third of a second, and there are hundreds of forks in a test run. Nothing here starts a thread.
"""

from importlib import import_module

from megatron.util import collector  # isort: skip  # first: no collections between the imports

from megatron.engine.environment import prepare_deepspeed

prepare_deepspeed()

from megatron.features.agreement.facts import versions  # noqa: E402
from megatron.features.run_record.surroundings import installed_packages  # noqa: E402
from megatron.run.run import flag_parser  # noqa: E402

MODULES = (
    "deepspeed",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.adam",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.utils.pin_memory",
    "encodings.utf_8_sig",
    "megatron.apps.planning.extent",
    "megatron.apps.planning.fit",
    "megatron.apps.planning.memory",
    "megatron.features.adapters.peft",
    "megatron.features.energy.callback",
    "megatron.features.experts.costs",
    "megatron.features.experts.layer",
    "megatron.features.masked.bert",
    "megatron.features.masked.t5",
    "megatron.features.resilience.restart.peers",
    "megatron.features.resilience.steps.replicas",
    "megatron.features.resilience.steps.spikes",
    "megatron.features.resilience.steps.stragglers",
    "megatron.features.resilience.watch.processes",
    "megatron.features.resilience.watch.watchdog",
    "megatron.features.run_record.callback",
    "megatron.features.run_record.surroundings",
    "megatron.formats.deepspeed_folders.universal",
    "megatron.formats.gguf.source",
    "megatron.formats.huggingface.source",
    "megatron.formats.legacy_megatron.reader",
    "megatron.formats.meta",
    "megatron.formats.sharded.megatron_core",
    "megatron.formats.trainers.dcp",
    "megatron.formats.trainers.litgpt",
    "megatron.formats.trainers.nanotron",
    "megatron.formats.trainers.olmo_core",
    "megatron.formats.trainers.zero",
    "megatron.tokenizer.gpt2_bpe",
    "megatron.tokenizer.plain",
    "megatron.training.build",
    "multiprocessing.sharedctypes",
    "numpy.ma",
    "torch._dynamo",
    "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
)
for name in MODULES:
    import_module(name)

flag_parser(None, frozenset())
versions()
installed_packages()
collector.resume()
