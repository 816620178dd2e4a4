"""Writers for Weights & Biases, MLflow and Trackio, which run in a background thread.

They use TensorBoard's tags. A resumed process creates a new run in the group with the run's name,
so that no curve has a step twice. Each tracker's environment variables apply, such as
``WANDB_MODE=offline``, ``MLFLOW_TRACKING_URI`` and ``TRACKIO_DIR``.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron.features.trackers.background import BackgroundWriter
from megatron.features.trackers.flags import TrackerFlags
from megatron.features.trackers.tags import as_markdown, flat, tagged
from megatron.training.registry import WrittenText, WrittenTexts
from megatron.training.writers import Values, Writer
from megatron.util.secrets import Redactor

_VARIABLES = {
    "mlflow": {"MLFLOW_DISABLE_TELEMETRY": "true"},
    "wandb": {
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_FINISH_TIMEOUT": "25",
        "WANDB_FINISH_TIMEOUT_RAISES": "true",
    },
}
"""Environment variables to set by default before a package is imported. Some disable usage and
error reports to the package's makers, even if a run only reports to files. The others keep the
process from waiting indefinitely for W&B's server at its end."""
_NOT_IN_NAMES = re.compile(r"[^\w. :/-]", re.ASCII)
"""Characters that MLflow does not allow in metric and parameter names."""
_MOST_PARAMS = 100
"""Maximum number of parameters in one request to MLflow."""
_LONGEST_PARAM = 500
"""Maximum length of a parameter value that every version and store of MLflow accepts."""


def opener(
    name: str, logging: TrackerFlags, configuration: Mapping[str, Any]
) -> Callable[[int, int], Writer]:
    """Return a function that opens a tracker's writer, given the iteration and number of samples
    before its first row. Only a new run waits for the tracker and raises its errors."""
    if name == "tensorboard":
        from megatron.features.trackers.tensorboard import TensorBoardWriter

        return lambda iteration, samples: TensorBoardWriter(logging, iteration, samples)
    services: dict[str, Callable[[TrackerFlags, Mapping[str, Any], int], Writer]]
    services = {"mlflow": MlflowWriter, "trackio": TrackioWriter, "wandb": WandbWriter}
    service = services[name]
    return lambda iteration, samples: BackgroundWriter(
        lambda: service(logging, configuration, iteration), wait=iteration == 0
    )


def package(name: str, flag: str, remedy: str) -> Any:
    """Import a tracker's package. Raises ValueError if it is not installed. The message names
    ``flag``, which requested the tracker, and ``remedy``."""
    for variable, value in _VARIABLES.get(name, {}).items():
        os.environ.setdefault(variable, value)
    try:
        module = import_module(name)
        spec = module.__spec__
        # a namespace package: a folder of this name, such as wandb creates
        if spec is not None and spec.origin is None:
            raise ImportError(f"{name} is a folder")
    except ImportError as error:
        raise ValueError(
            f"{flag} needs the package {name}, which is not installed: run `pip install {name}`, "
            f"or {remedy}"
        ) from error
    return module


class MlflowWriter:
    """Writer for MLflow, which stores runs in a database in the run's folder or on a server. The
    run name is also the tag ``group``. Raises ValueError if MLflow is not installed or does not
    start."""

    def __init__(
        self, logging: TrackerFlags, configuration: Mapping[str, Any], iteration: int
    ) -> None:
        package("mlflow", "--report-to mlflow", "leave out mlflow")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        where = logging.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        assert where is not None
        artifacts = _prepare_folder(where)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or logging.tracker_project
        tags = {"resumed_at_iteration": str(iteration)} if iteration else {}
        if logging.run_name is not None:
            tags["group"] = logging.run_name
        try:
            self._client: Any = MlflowClient(where)
            experiment = self._client.get_experiment_by_name(name)
            number = (
                self._client.create_experiment(name, artifact_location=artifacts)
                if experiment is None
                else experiment.experiment_id
            )
            run = self._client.create_run(number, run_name=logging.run_name, tags=tags)
            self._run: str = run.info.run_id
            params = [
                Param(_mlflow_name(key), value[:_LONGEST_PARAM])
                for key, value in flat(configuration).items()
            ]
            for at in range(0, len(params), _MOST_PARAMS):
                self._client.log_batch(self._run, params=params[at : at + _MOST_PARAMS])
        except Exception as error:  # MLflow has many error classes
            hide = Redactor(os.environ)
            raise ValueError(
                f"--report-to mlflow: MLflow does not start with {hide.text(where)} ("
                f"{hide.text(' '.join(str(error).split()))[:300]}); name another "
                "--mlflow-tracking-uri, such as sqlite:////folder/mlflow.db"
            ) from error

    def scalars(self, kind: str, step: int, values: Values, *, samples: int, tokens: int) -> None:
        if shown := dict(tagged(kind, values)):
            shown |= {"samples": samples, "tokens": tokens}
            now = int(1000 * time.time())
            self._client.log_batch(
                self._run,
                metrics=[
                    self._metric(_mlflow_name(tag), float(value), now, step)
                    for tag, value in shown.items()
                ],
            )

    def texts(self, written: WrittenTexts, *, samples: int, tokens: int) -> None:
        """Write the texts as an artifact, ``samples/iteration-N.md``."""
        text = "\n\n---\n\n".join(map(as_markdown, written.texts))
        self._client.log_text(self._run, text, f"samples/iteration-{written.iteration}.md")

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _prepare_folder(uri: str) -> str | None:
    """Create the folder of a file database. Return the folder next to it for the runs' artifacts,
    or None if the store chooses it."""
    if not uri.startswith("sqlite:///"):
        return None
    database = Path(uri.removeprefix("sqlite:///"))
    database.parent.mkdir(parents=True, exist_ok=True)
    return (database.parent / "mlflow-artifacts").resolve().as_uri()


def _mlflow_name(tag: str) -> str:
    return _NOT_IN_NAMES.sub("_", tag)


class TrackioWriter:
    """Writer for Trackio, which stores runs in the user's Trackio folder or in a Hugging Face
    Space. Raises ValueError if Trackio is not installed or does not start."""

    def __init__(
        self, logging: TrackerFlags, configuration: Mapping[str, Any], iteration: int
    ) -> None:
        self._trackio = package("trackio", "--report-to trackio", "leave out trackio")
        name = logging.run_name
        try:
            self._run: Any = self._trackio.init(
                project=logging.tracker_project,
                name=f"{name} from iteration {iteration}" if name and iteration else name,
                group=name,
                config=flat(configuration),
                embed=False,
                # Trackio would log GPU metrics under its own step numbers. The log has memory use.
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except Exception as error:  # Trackio has many error classes
            raise ValueError(
                f"--report-to trackio: trackio does not start ({' '.join(str(error).split())[:300]}"
                "); see TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL in the environment"
            ) from error

    def scalars(self, kind: str, step: int, values: Values, *, samples: int, tokens: int) -> None:
        if shown := dict(tagged(kind, values)):
            self._run.log(shown | {"samples": samples, "tokens": tokens}, step=step)

    def texts(self, written: WrittenTexts, *, samples: int, tokens: int) -> None:
        text = "\n\n---\n\n".join(map(as_markdown, written.texts))
        self._run.log({"samples of text": self._trackio.Markdown(text)}, step=written.iteration)

    def close(self) -> None:
        self._run.finish()


class WandbWriter:
    """Writer for Weights & Biases. Log lines are also written under Megatron-DeepSpeed's keys
    ``loss/...`` and ``throughput/...``. Raises ValueError if wandb is missing or does not start."""

    def __init__(
        self, logging: TrackerFlags, configuration: Mapping[str, Any], iteration: int = 0
    ) -> None:
        project = logging.wandb_project
        flag = f"--wandb-project {project}" if project else "--report-to wandb"
        remedy = "leave out wandb, --wandb-project and the other --wandb-* flags"
        self._wandb = package("wandb", flag, remedy)
        if logging.wandb_save_dir is not None:
            # If the folder does not exist, wandb only warns and uses a temporary one.
            Path(logging.wandb_save_dir).mkdir(parents=True, exist_ok=True)
        self._layout = configuration.get("parallel", {})
        name = logging.wandb_exp_name or logging.run_name
        try:
            self._run: Any = self._wandb.init(
                project=project or os.environ.get("WANDB_PROJECT") or logging.tracker_project,
                entity=logging.wandb_entity,
                name=name,
                group=name,
                dir=logging.wandb_save_dir,
                config=dict(configuration),
            )
        except Exception as error:  # wandb has many error classes
            raise ValueError(
                f"{flag}: Weights & Biases does not start ({' '.join(str(error).split())}); run "
                "`wandb login`, or set WANDB_MODE=offline"
            ) from error

    def scalars(self, kind: str, step: int, values: Values, *, samples: int, tokens: int) -> None:
        shown = dict(tagged(kind, values))
        if kind == "train":
            shown |= with_groups(values, self._layout)
        if shown:
            self._run.log(shown | {"samples": samples, "tokens": tokens}, step=step)

    def texts(self, written: WrittenTexts, *, samples: int, tokens: int) -> None:
        rows = [list(text) for text in written.texts]
        table = self._wandb.Table(columns=list(WrittenText._fields), data=rows)
        self._run.log({"samples of text": table}, step=written.iteration)

    def close(self) -> None:
        self._run.finish()


def with_groups(values: Values, layout: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (key, value) for a log line's losses and rates, under Megatron-DeepSpeed's keys."""
    several = [name for name in values if name.endswith(" loss")]
    losses = {name: name for name in several} or {"loss": "lm loss"}
    keys = {f"loss/{shown}": values.get(name) for name, shown in losses.items()}
    replicas, devices = layout.get("data_parallel_size", 1), layout.get("world_size", 1)
    per_device = values.get("tokens_per_second_per_device")
    rates = {
        "samples_per_sec": values.get("samples_per_second"),
        "tokens_per_sec": None if per_device is None else per_device * devices,
        "tokens_per_gpu_per_sec": per_device,
    }
    for name, rate in rates.items():
        keys[f"throughput/{name}"] = rate
        keys[f"throughput/{name}_per_replica"] = None if rate is None else rate / replicas
    seconds = values.get("seconds_per_iteration")
    keys["throughput/iteration-time"] = seconds
    keys["throughput/elapsed_ms_per_iteration"] = None if seconds is None else 1000 * seconds
    keys["throughput/tflops"] = values.get("tflops_per_device")
    return ((key, value) for key, value in keys.items() if value is not None)
