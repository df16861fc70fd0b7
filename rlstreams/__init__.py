"""Event-sourced, asynchronous RL post-training of language models over Apache Kafka.

`run` starts a run, `open_run` opens one for reading, `RunConfig` and its sections configure one:
infra/docs/python-api.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlstreams.streams.log.errors import ConfigError as ConfigError
    from rlstreams.streams.log.errors import StreamsError as StreamsError
    from rlstreams.streams.run.open_run import open_run as open_run
    from rlstreams.streams.run.run_log import RunLog as RunLog
    from rlstreams.up.api.run import Evaluation as Evaluation
    from rlstreams.up.api.run import Run as Run
    from rlstreams.up.api.run import RunFailedError as RunFailedError
    from rlstreams.up.api.run import Step as Step
    from rlstreams.up.api.run import run as run
    from rlstreams.workers.config.data import ColumnsSection as ColumnsSection
    from rlstreams.workers.config.data import DataSection as DataSection
    from rlstreams.workers.config.data import Example as Example
    from rlstreams.workers.config.data import GymSection as GymSection
    from rlstreams.workers.config.engine import EngineSection as EngineSection
    from rlstreams.workers.config.loss import LossSection as LossSection
    from rlstreams.workers.config.operation import BrokerSection as BrokerSection
    from rlstreams.workers.config.operation import DeadLettersSection as DeadLettersSection
    from rlstreams.workers.config.operation import DeadlinesSection as DeadlinesSection
    from rlstreams.workers.config.reward import EnvironmentSection as EnvironmentSection
    from rlstreams.workers.config.reward import RewardPart as RewardPart
    from rlstreams.workers.config.reward import RewardSection as RewardSection
    from rlstreams.workers.config.run import LogprobSection as LogprobSection
    from rlstreams.workers.config.run import ModelSection as ModelSection
    from rlstreams.workers.config.run import PromptsSection as PromptsSection
    from rlstreams.workers.config.run import RolloutSection as RolloutSection
    from rlstreams.workers.config.run import RunConfig as RunConfig
    from rlstreams.workers.config.run import RunSection as RunSection
    from rlstreams.workers.config.run import WeightsSection as WeightsSection
    from rlstreams.workers.config.trainer import LoraSection as LoraSection
    from rlstreams.workers.config.trainer import OptimizerSection as OptimizerSection
    from rlstreams.workers.config.trainer import TrainerSection as TrainerSection

_HOMES = {
    "streams.log.errors": "ConfigError StreamsError",
    "streams.run.open_run": "open_run",
    "streams.run.run_log": "RunLog",
    "up.api.run": "Evaluation Run RunFailedError Step run",
    "workers.config.data": "ColumnsSection DataSection Example GymSection",
    "workers.config.engine": "EngineSection",
    "workers.config.loss": "LossSection",
    "workers.config.operation": "BrokerSection DeadLettersSection DeadlinesSection",
    "workers.config.reward": "EnvironmentSection RewardPart RewardSection",
    "workers.config.run": "LogprobSection ModelSection PromptsSection RolloutSection "
    "RunConfig RunSection WeightsSection",
    "workers.config.trainer": "LoraSection OptimizerSection TrainerSection",
}  # by module


def __getattr__(name: str) -> object:
    """Import an exported name at its first use: `import rlstreams` costs nothing."""
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(f"rlstreams.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *" ".join(_HOMES.values()).split()]
