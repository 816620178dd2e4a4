"""Planted bugs of weights that two pipeline stages have."""

# ruff: noqa: E501  texts of the source

from places import COUNT, DOUBLE, EXECUTOR, GROUP, LAYERS, LOST, MISSING, OPTIMIZER, SCALE
from planted import Planted

BUGS = [
    Planted("tied-not-summed", "tied", MISSING, EXECUTOR,
            "            dist.all_reduce(gradient, group=tied_group)\n",
            "",
            "copies of a tied weight keep the gradients of their stages"),
    Planted("tied-summed-twice", "tied", DOUBLE, EXECUTOR,
            "            dist.all_reduce(gradient, group=tied_group)\n",
            "            dist.all_reduce(gradient, group=tied_group)\n"
            "            dist.all_reduce(gradient, group=tied_group)\n",
            "copies of a tied weight are summed twice"),
    Planted("tied-over-pipeline", "tied", GROUP, EXECUTOR,
            "            dist.all_reduce(gradient, group=tied_group)\n",
            "            dist.all_reduce(gradient, group=self._mesh.model.handle)\n",
            "tied gradients are summed over tensor-parallel ranks as well"),
    Planted("tied-replicas-not-divided", "tied", SCALE, EXECUTOR,
            "                gradient /= replicas.size\n",
            "",
            "tied gradients are sums over replicas"),
    Planted("tied-counted-twice", "tied", COUNT, OPTIMIZER,
            "return not replicated and shard_of(param).counted",
            "return shard_of(param).counted",
            "both copies of a tied weight count in norm and checkpoint"),
    Planted("tied-not-counted", "tied", COUNT, OPTIMIZER,
            "return not replicated and shard_of(param).counted",
            'return not hasattr(param, "ds_pipe_replicated") and shard_of(param).counted',
            "no copy of a tied weight counts"),
    Planted("tied-first-only", "tied", LOST, EXECUTOR,
            "        self._reduce_tied_gradients()\n        self._exec_reduce_grads()",
            "        self._exec_reduce_grads()",
            "tied gradients are not reduced at all"),
    Planted("tied-head-bias-gradient", "tied", LOST, LAYERS,
            "return found_BSH if self.bias is None else ZeroGradient.apply(found_BSH, "
            "self.bias)",
            "return found_BSH",
            "a stage that only looks tokens up has no gradient of the head's bias"),
]  # fmt: skip
