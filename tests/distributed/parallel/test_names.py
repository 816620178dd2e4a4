"""LayerStack registers its parameters under the names that DeepSpeed's PipelineModule gives."""

import pytest
from configs import model_config, run_config
from pool import tensor_group
from torch import nn

from megatron.config import ParallelConfig
from megatron.families.gpt import gpt_layers
from megatron.model.layer_list import LayerStack


def names(tied: bool) -> tuple[list[str], list[str]]:
    """Parameter names of the same layer list in both engines."""
    tensor_group()
    from megatron.engine.environment import prepare_deepspeed

    prepare_deepspeed()
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model = model_config(
        num_layers=3, hidden_size=16, ffn_hidden_size=32, num_attention_heads=2,
        num_query_groups=2, kv_channels=8, seq_length=8, max_position_embeddings=8,
        untie_embeddings_and_output_weights=not tied,
    )  # fmt: skip
    model = run_config(model=model).with_vocabulary(50).model
    recipes = gpt_layers(model, ParallelConfig())

    def spec(recipe: LayerSpec) -> LayerSpec:
        if recipe.tied_key is None:
            made = LayerSpec(nn.Module)
        else:
            made = TiedLayerSpec(
                recipe.tied_key,
                nn.Module,
                forward_fn=recipe.forward,
                tied_weight_attr="word_embeddings.weight",
            )
        made.build = lambda log=False: recipe.build()
        return made

    pipeline = PipelineModule([spec(recipe) for recipe in recipes], num_stages=1)
    stack = LayerStack(recipes, ParallelConfig())
    return [n for n, _ in stack.named_parameters()], [n for n, _ in pipeline.named_parameters()]


@pytest.mark.parametrize("tied", [True, False])
def test_against_deepspeed_pipeline_module(pool, tied):
    ((ours, theirs),) = pool.run(1, names, tied)
    assert sorted(ours) == sorted(theirs)
