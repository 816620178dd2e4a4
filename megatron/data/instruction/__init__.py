"""Instructions and answers as packed samples with a loss on the answers."""

from megatron.data.instruction.encode import ExampleEncoder
from megatron.data.instruction.examples import InstructionExamples
from megatron.data.instruction.recipe import InstructionDataset, InstructionRecipe

__all__ = ["ExampleEncoder", "InstructionDataset", "InstructionExamples", "InstructionRecipe"]
