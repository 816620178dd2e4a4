"""Random layerwise token dropping (random-LTD). In training, layers in the middle of the model
compute only randomly chosen tokens; their number grows until no token is dropped (Yao et al. 2022,
arXiv:2211.11586)."""

from __future__ import annotations

from typing import Any

from megatron.config.features import Feature
from megatron.config.flags import ConfigResolver
from megatron.features.random_ltd.flags import RandomLTDConfig, dropping_of


class RandomLTDFeature(Feature):
    needs = ("curriculum",)
    sections = {"random_ltd": RandomLTDConfig}
    training_flags = (RandomLTDConfig,)

    def check(self, config: Any, processes: int, resolver: ConfigResolver) -> None:
        if not config.section(RandomLTDConfig).random_ltd:
            return
        dropping = dropping_of(config)
        resolver.check(
            dropping is not None,
            "--random-ltd needs data_efficiency.data_routing.random_ltd in the DeepSpeed JSON, and "
            '"enabled": true in each of these three sections',
        )
        assert dropping is not None
        dropping.check(config, resolver)

    def data_kind(self, section: str) -> Any:
        from megatron.features.random_ltd.lengths import KIND

        return KIND

    def why_eager(self, config: Any, automatic: bool) -> str | None:
        if not automatic or dropping_of(config) is None:
            return None
        return "every reserved length of --random-ltd would be compiled"

    def model(self, spec: Any, config: Any) -> Any:
        dropping = dropping_of(config)
        if dropping is None:
            return spec
        from megatron.features.random_ltd.layers import with_dropping

        return with_dropping(spec, dropping, config.model)

    def before_load(self, context: Any) -> None:
        """Add the callback that counts layer tokens, and store its count in checkpoints."""
        dropping = dropping_of(context.config)
        if dropping is None:
            return
        from megatron.features.random_ltd.layers import LayerTokens
        from megatron.training.context import Order

        counting = LayerTokens(dropping, context.plan.batch_size.samples, context.engine.layers)
        context.notes["random_ltd"] = counting.state
        context.add(Order.COMPARE, counting)


FEATURE = RandomLTDFeature()
