"""Event-sourced, asynchronous RL post-training of language models over Apache Kafka.

`run` starts a run, `open_run` opens one for reading, `RunConfig` and its sections configure one:
infra/docs/python-api.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlstreams.streams.log.errors import ConfigError, StreamsError
    from rlstreams.streams.run.open_run import open_run
    from rlstreams.streams.run.run_log import RunLog
    from rlstreams.up.api.run import Evaluation, Run, RunFailedError, Step, run
    from rlstreams.workers.config.data import ColumnsSection, DataSection, Example, GymSection
    from rlstreams.workers.config.engine import EngineSection
    from rlstreams.workers.config.loss import LossSection
    from rlstreams.workers.config.operation import DeadLettersSection, DeadlinesSection
    from rlstreams.workers.config.reward import EnvironmentSection, RewardPart, RewardSection
    from rlstreams.workers.config.run import (
        BrokerSection,
        LogprobSection,
        ModelSection,
        PromptsSection,
        RolloutSection,
        RunConfig,
        RunSection,
        WeightsSection,
    )
    from rlstreams.workers.config.trainer import LoraSection, OptimizerSection, TrainerSection

_HOMES = {
    "streams.log.errors": "ConfigError StreamsError",
    "streams.run.open_run": "open_run",
    "streams.run.run_log": "RunLog",
    "up.api.run": "Evaluation Run RunFailedError Step run",
    "workers.config.data": "ColumnsSection DataSection Example GymSection",
    "workers.config.engine": "EngineSection",
    "workers.config.loss": "LossSection",
    "workers.config.operation": "DeadLettersSection DeadlinesSection",
    "workers.config.reward": "EnvironmentSection RewardPart RewardSection",
    "workers.config.run": "BrokerSection LogprobSection ModelSection PromptsSection "
    "RolloutSection RunConfig RunSection WeightsSection",
    "workers.config.trainer": "LoraSection OptimizerSection TrainerSection",
}  # by module
__all__ = [
    "BrokerSection",
    "ColumnsSection",
    "ConfigError",
    "DataSection",
    "DeadLettersSection",
    "DeadlinesSection",
    "EngineSection",
    "EnvironmentSection",
    "Evaluation",
    "Example",
    "GymSection",
    "LogprobSection",
    "LoraSection",
    "LossSection",
    "ModelSection",
    "OptimizerSection",
    "PromptsSection",
    "RewardPart",
    "RewardSection",
    "RolloutSection",
    "Run",
    "RunConfig",
    "RunFailedError",
    "RunLog",
    "RunSection",
    "Step",
    "StreamsError",
    "TrainerSection",
    "WeightsSection",
    "open_run",
    "run",
]


def __getattr__(name: str) -> object:
    """What is exported, imported when it is asked for: `import rlstreams` costs nothing."""
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(f"rlstreams.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
