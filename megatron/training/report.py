"""What a run says: the console of the main process and the metric writers."""

from __future__ import annotations

import dataclasses
import time

import torch

from megatron.config import RunConfig
from megatron.parallel.mesh import Mesh
from megatron.training.flops import TransformerShape, measure_matmul_peak, peak_flops
from megatron.training.metrics import EvaluationMetrics, IntervalMeter
from megatron.training.plan import TrainingPlan
from megatron.training.resume import Start
from megatron.training.run import Run
from megatron.training.writers import TeeWriter, Writer, build_writers


class Reporter:
    """Log lines and metrics; only the main process speaks and writes.

    Args:
        run: the run.
        plan: its course.
        mesh: the layout's process groups.
        device: this process's device.
        begin: where it starts.
    """

    def __init__(
        self,
        run: Run,
        plan: TrainingPlan,
        mesh: Mesh,
        device: torch.device,
        begin: Start,
    ) -> None:
        config = run.config
        self.plan, self.mesh, self.device = plan, mesh, device
        self.main = mesh.world.rank == 0
        self.shape = transformer_shape(config)
        self.flops_per_token = self.shape.flops_per_token(causal=True)
        self.peak = _peak(config, device)
        self.writer: Writer = TeeWriter(())
        if self.main:
            self.writer = build_writers(
                config.logging,
                resume_iteration=begin.iteration,
                resume_samples=begin.consumed_samples,
                configuration=config.to_dict(),
            )
            if begin.iteration:
                samples = begin.consumed_samples
                tokens = plan.lengths.tokens(samples)
                self.writer.scalars("resume", begin.iteration, {}, samples=samples, tokens=tokens)
        self._announce(run, begin)

    def _announce(self, run: Run, begin: Start) -> None:
        config = run.config
        given = {n: o for n, o in run.resolved.origins.items() if o.startswith(("flag", "derived"))}
        self.say(f"{len(given)} values given or derived; --explain-config prints all")
        for note in run.resolved.notes:
            self.say(note)
        self.say(f"layout: {_layout(config)} on {self.device.type}")
        self.say(
            f"batches: micro {self.plan.micro_batch_size}, global {self.plan.global_batch_size}, "
            f"{self.plan.train_iters} iterations"
        )
        if self.peak is not None:
            self.say(
                f"FLOP utilisation is relative to {self.peak / 1e12:.3g} TFLOP/s per device "
                f"({_peak_source(config, self.device)}); causal attention counted once"
            )
        if begin.folder is None:
            if config.checkpoint.load:
                self.say(f"no checkpoint in {config.checkpoint.load}: starting from random weights")
            return
        if begin.weights_only:
            self.say(f"weights from {begin.folder}; starting at iteration 0")
        else:
            self.say(f"resumed from {begin.folder} at iteration {begin.iteration}")
        for line in begin.notes:
            self.say(f"{begin.folder}: {line}")
        for line in begin.changed:
            self.say(f"differs from the checkpoint's run: {line}")

    def say(self, text: str) -> None:
        """Prints a line with the time, on the main process."""
        if self.main:
            say(text)

    def meter(self) -> IntervalMeter:
        """A meter whose clock starts now."""
        return IntervalMeter(
            train_iters=self.plan.train_iters,
            flops_per_token=self.flops_per_token,
            device=self.device,
            devices=self.mesh.world.size,
            peak_flops=self.peak,
        )

    def step_flops(self, samples: int, seq_length: int) -> float:
        """Model FLOPs of a step on samples of so many tokens, over all devices."""
        shape = dataclasses.replace(self.shape, seq_length=seq_length)
        return shape.flops_per_step(samples, causal=True)

    def interval(self, meter: IntervalMeter, iteration: int, consumed_samples: int) -> None:
        """Reports the steps since the last call."""
        tokens = self.plan.lengths.tokens(consumed_samples)
        metrics = meter.finish(
            iteration=iteration, consumed_samples=consumed_samples, consumed_tokens=tokens
        )
        self.say(metrics.line().strip())
        self.writer.scalars(
            "train", iteration, metrics.row(), samples=consumed_samples, tokens=tokens
        )

    def evaluation(self, metrics: EvaluationMetrics, consumed_samples: int) -> None:
        """Reports an evaluation."""
        self.say(metrics.line().strip())
        self.writer.scalars(
            metrics.kind,
            metrics.iteration,
            metrics.row(),
            samples=consumed_samples,
            tokens=self.plan.lengths.tokens(consumed_samples),
        )

    def save(self, iteration: int, consumed_samples: int, values: dict[str, float | None]) -> None:
        """Records a save that has come to an end."""
        tokens = self.plan.lengths.tokens(consumed_samples)
        self.writer.scalars("save", iteration, values, samples=consumed_samples, tokens=tokens)

    def close(self) -> None:
        """Writes what is still held back."""
        self.writer.close()


def say(text: str) -> None:
    """Prints a line with the time."""
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}", flush=True)


def transformer_shape(config: RunConfig) -> TransformerShape:
    """The numbers that the FLOPs depend on."""
    model = config.model
    assert model.num_layers and model.hidden_size and model.ffn_hidden_size
    assert model.num_attention_heads and model.num_query_groups and model.kv_channels
    assert model.seq_length and model.padded_vocab_size
    return TransformerShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        seq_length=model.seq_length,
        padded_vocab_size=model.padded_vocab_size,
        gated=model.gated,
        windows=model.windows,
    )


def _layout(config: RunConfig) -> str:
    layout = config.parallel
    pipeline, data = layout.pipeline_model_parallel_size, layout.data_parallel_size
    words = [
        f"{layout.world_size} processes, pipeline x data x tensor = "
        f"{pipeline} x {data} x {layout.tensor_model_parallel_size}"
    ]
    if pipeline > 1:
        chunks = layout.num_virtual_stages_per_pipeline_rank
        words.append(f"{layout.pipeline_schedule} with {chunks} stages per process")
    if layout.sequence_parallel:
        words.append("sequence parallel")
    return ", ".join([*words, f"ZeRO stage {config.engine.zero_stage}", _precision(config)])


def _precision(config: RunConfig) -> str:
    precision = config.precision
    return "fp16" if precision.fp16 else "bf16" if precision.bf16 else "fp32"


def _peak(config: RunConfig, device: torch.device) -> float | None:
    """FLOP/s that one device could do: told, from its data sheet, or measured on a CPU."""
    if config.logging.peak_tflops is not None:
        return config.logging.peak_tflops * 1e12
    if device.type != "cpu":
        return peak_flops(device)
    dtype = torch.bfloat16 if config.precision.bf16 else torch.float32
    return measure_matmul_peak(dtype, device, seconds=0.2)


def _peak_source(config: RunConfig, device: torch.device) -> str:
    if config.logging.peak_tflops is not None:
        return "--peak-tflops"
    return "data sheet" if device.type != "cpu" else "measured by matrix products at start"
