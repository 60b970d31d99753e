"""Options of a run: dataclasses, YAML with dotted overrides, and checks of their agreement."""

from areal_core.config.checks import check_config
from areal_core.config.engine import (
    DPOEngineConfig,
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
    DatasetConfig,
    DebugConfig,
    DPOConfig,
    EvaluatorConfig,
    GRPOConfig,
    PPOConfig,
    RecoverConfig,
    RWConfig,
    SaverConfig,
    SFTConfig,
    ValidDatasetConfig,
)
from areal_core.config.generation import (
    AgentConfig,
    GenerationHyperparameters,
    InferenceEngineConfig,
    SGLangConfig,
)
from areal_core.config.loading import config_from_dict, config_to_dict, load_expr_config, without_keys
from areal_core.config.not_yet import NOT_YET, NotYet
from areal_core.config.services import ClusterSpecConfig, LauncherConfig, StatsLoggerConfig

__all__ = [
    "NOT_YET",
    "AgentConfig",
    "BaseExperimentConfig",
    "ClusterSpecConfig",
    "DPOConfig",
    "DPOEngineConfig",
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
    "RWConfig",
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
    "without_keys",
]
