"""Every option of a run: dataclasses, YAML with dotted overrides, and checks of options that must agree."""

from areal_core.config.checks import check_config
from areal_core.config.engine import (
    FSDPEngineConfig,
    FSDPWrapPolicy,
    MicroBatchSpec,
    NormConfig,
    OptimizerConfig,
    PPOActorConfig,
    PPOCriticConfig,
    RejectionSamplingConfig,
    TeacherConfig,
    TrainEngineConfig,
)
from areal_core.config.experiment import (
    BaseExperimentConfig,
    ClusterSpecConfig,
    DatasetConfig,
    DebugConfig,
    EvaluatorConfig,
    GRPOConfig,
    LauncherConfig,
    PPOConfig,
    RecoverConfig,
    SaverConfig,
    SFTConfig,
    StatsLoggerConfig,
    ValidDatasetConfig,
)
from areal_core.config.generation import (
    AgentConfig,
    GenerationHyperparameters,
    InferenceEngineConfig,
    SGLangConfig,
)
from areal_core.config.loading import config_from_dict, config_to_dict, load_expr_config
from areal_core.config.not_yet import NOT_YET, NotYet

__all__ = [
    "NOT_YET",
    "AgentConfig",
    "BaseExperimentConfig",
    "ClusterSpecConfig",
    "DatasetConfig",
    "DebugConfig",
    "EvaluatorConfig",
    "FSDPEngineConfig",
    "FSDPWrapPolicy",
    "GRPOConfig",
    "GenerationHyperparameters",
    "InferenceEngineConfig",
    "LauncherConfig",
    "MicroBatchSpec",
    "NormConfig",
    "NotYet",
    "OptimizerConfig",
    "PPOActorConfig",
    "PPOConfig",
    "PPOCriticConfig",
    "RecoverConfig",
    "RejectionSamplingConfig",
    "SFTConfig",
    "SGLangConfig",
    "SaverConfig",
    "StatsLoggerConfig",
    "TeacherConfig",
    "TrainEngineConfig",
    "ValidDatasetConfig",
    "check_config",
    "config_from_dict",
    "config_to_dict",
    "load_expr_config",
]
