"""Weights & Biases, MLflow and Trackio, each of which is called in a thread.

All show TensorBoard's tags. A resumed process is a new run in the group of the run's name, so that
no curve has a step twice. The environment variables of each program apply, such as
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
"""Variables that a package reads at the import or later. Without the first ones it tells its makers
of its use or errors, also where a run reports to files only; without the others the process would
wait for W&B's server indefinitely when it ends."""
_NOT_IN_NAMES = re.compile(r"[^\w. :/-]", re.ASCII)
"""Characters that MLflow accepts in no name of a metric or parameter."""
_MOST_PARAMS = 100
"""In one request of MLflow."""
_LONGEST_PARAM = 500
"""Characters of a parameter that every version and store of MLflow accepts."""


def opener(
    name: str, logging: TrackerFlags, configuration: Mapping[str, Any]
) -> Callable[[int, int], Writer]:
    """Return a function that opens the writer of a tracker, given the iteration and number of
    samples before what it gets. A new training waits for the program and raises its errors; one
    that was resumed continues meanwhile."""
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
    """Return the module of a tracker. Raises ValueError, naming the flag that asked for it and the
    remedy, if it is not installed."""
    for variable, value in _VARIABLES.get(name, {}).items():
        os.environ.setdefault(variable, value)
    try:
        module = import_module(name)
        spec = module.__spec__
        if spec is not None and spec.origin is None:  # a folder of this name, as wandb makes
            raise ImportError(f"{name} is a folder")
    except ImportError as error:
        raise ValueError(
            f"{flag} needs the package {name}, which is not installed: run `pip install {name}`, "
            f"or {remedy}"
        ) from error
    return module


class MlflowWriter:
    """MLflow: a database in the run's folder, or a server. Runs with the same name share it as
    their tag ``group``. Raises ValueError if it is not installed or does not start."""

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
        except Exception as error:  # it has many classes
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
        """Writes an artifact, ``samples/iteration-N.md``."""
        text = "\n\n---\n\n".join(map(as_markdown, written.texts))
        self._client.log_text(self._run, text, f"samples/iteration-{written.iteration}.md")

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _prepare_folder(uri: str) -> str | None:
    """Make the folder of a database in a file. Return the folder for the files of runs next to it;
    None where the store decides."""
    if not uri.startswith("sqlite:///"):
        return None
    database = Path(uri.removeprefix("sqlite:///"))
    database.parent.mkdir(parents=True, exist_ok=True)
    return (database.parent / "mlflow-artifacts").resolve().as_uri()


def _mlflow_name(tag: str) -> str:
    return _NOT_IN_NAMES.sub("_", tag)


class TrackioWriter:
    """Trackio: databases in a folder of the user, or a Space of Hugging Face. Raises ValueError if
    it is not installed or does not start."""

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
                # They have separate steps, and the log contains the memory.
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except Exception as error:  # it has many classes
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
    """Weights & Biases; log lines also under Megatron-DeepSpeed's keys ``loss/...`` and
    ``throughput/...``. Raises ValueError if it is not installed or does not start."""

    def __init__(
        self, logging: TrackerFlags, configuration: Mapping[str, Any], iteration: int = 0
    ) -> None:
        project = logging.wandb_project
        flag = f"--wandb-project {project}" if project else "--report-to wandb"
        remedy = "leave out wandb, --wandb-project and the other --wandb-* flags"
        self._wandb = package("wandb", flag, remedy)
        if logging.wandb_save_dir is not None:
            # Without the folder wandb would only warn and use a temporary one.
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
        except Exception as error:  # it has many classes
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
    """Yield the losses and rates of a log line by Megatron-DeepSpeed's keys."""
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
