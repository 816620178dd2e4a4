"""Environments to begin with: a calculator that the model calls, and a game of guessing numbers.

python finetune.py --rl grpo --environment examples_deepspeed/rl/environments.py:Calculator ...
"""

import ast
import operator
import re

from megatron.apps.reinforcement.rewards.tools import ToolEnvironment

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


class Calculator(ToolEnvironment):
    """A question whose number may be computed: 1 for the answer of the record, 0 for another."""

    tools = ("calculate",)

    def calculate(self, expression: str) -> str:
        """The value of numbers with + - * / and parentheses."""
        value = _value(ast.parse(expression[:200], mode="eval").body)
        return str(int(value) if float(value).is_integer() else value)

    def reward(self, text: str) -> float:
        numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
        return float(numbers[-1:] == [str(self.prompt.columns["answer"])])


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError("numbers with + - * / and parentheses only")


class Guessing:
    """The number of the record, "secret", is to be guessed from answers: smaller or larger. The
    reward is 1 at the first guess, and less for every other."""

    def reset(self, prompt):
        self.secret, self.guesses = int(prompt.columns["secret"]), 0
        return [{"role": "user", "content": "Guess a number from 1 to 100."}]

    def step(self, text):
        self.guesses += 1
        numbers = re.findall(r"\d+", text)
        if not numbers:
            return [{"role": "user", "content": "Write a number."}], 0.0, self.guesses >= 8
        guess = int(numbers[-1][:9])
        if guess == self.secret:
            return [], 1.0 - 0.1 * (self.guesses - 1), True
        hint = "smaller" if self.secret < guess else "larger"
        return [{"role": "user", "content": f"It is {hint}."}], None, self.guesses >= 8
