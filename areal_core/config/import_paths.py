"""Import paths of upstream AReaL, of 0.3 to 2.0, and what they are called here.

Paths in strings (workflows, agents, reward functions) are translated where they are imported. A
script that imports from `areal` itself gets the lines to write instead (`replacements`).
"""

import ast
import difflib
from collections.abc import Iterator
from importlib.util import find_spec

PACKAGES = ("areal", "realhf")
PAGE = "docs/coming_from_areal.md lists what there is"
WORKFLOWS = {
    "areal.workflow.rlvr.RLVRWorkflow": "areal_core.rollout.workflow.RLVRWorkflow",
    "areal.workflow.vision_rlvr.VisionRLVRWorkflow": "areal_core.rollout.vision_workflow.VisionRLVRWorkflow",
    "areal.workflow.multi_turn.MultiTurnWorkflow": "areal_core.agent.multi_turn.MultiTurnWorkflow",
    "areal.workflow.openai.math_agent.MathAgent": "areal_core.agent.ready.math_agents.MathAgent",
    "areal.workflow.openai.math_agent.MultiTurnMathAgent": "areal_core.agent.ready.math_agents.MultiTurnMathAgent",
    "areal.workflow.anthropic.math_agent.MathAgent": "areal_core.agent.ready.math_agents.MathAgent",
}
FUNCTIONS = "areal_core.reward.functions"
REWARDS = {
    "areal.reward.gsm8k.gsm8k_reward_fn": f"{FUNCTIONS}.gsm8k_reward_fn",
    "areal.reward.clevr_count_70k.clevr_count_70k_reward_fn": f"{FUNCTIONS}.clevr_count_70k_reward_fn",
    "areal.reward.geometry3k.geometry3k_reward_fn": f"{FUNCTIONS}.geometry3k_reward_fn",
    "examples.vlm.clevr_count_70k_grpo.clevr_count_70k_reward_fn": f"{FUNCTIONS}.clevr_count_70k_reward_fn",
    "examples.vlm.geometry3k_grpo.geometry3k_reward_fn": f"{FUNCTIONS}.reasoned_reward_fn",
    "examples.vlm_npu.geometry3k_grpo.geometry3k_reward_fn": f"{FUNCTIONS}.reasoned_reward_fn",
    "examples.vlm_npu.virl39k_grpo.virl39k_reward_fn": f"{FUNCTIONS}.reasoned_reward_fn",
}
CONFIGS = (
    "GRPOConfig", "PPOConfig", "SFTConfig", "RWConfig", "DPOConfig", "BaseExperimentConfig",
    "GenerationHyperparameters", "InferenceEngineConfig", "SGLangConfig", "TrainEngineConfig",
    "PPOActorConfig", "PPOCriticConfig", "OptimizerConfig", "MicroBatchSpec", "NormConfig",
    "load_expr_config",
)  # fmt: skip
OF_SCRIPTS = {
    "areal.trainer.rl_trainer.PPOTrainer": "areal_core.trainer.rl.PPOTrainer",
    "areal.trainer.sft_trainer.SFTTrainer": "areal_core.trainer.sft.SFTTrainer",
    "areal.trainer.rw_trainer.RWTrainer": "areal_core.trainer.reward_model.RWTrainer",
    "areal.trainer.dpo_trainer.DPOTrainer": "areal_core.trainer.dpo.DPOTrainer",
    "areal.experimental.trainer.rl.PPOTrainer": "areal_core.trainer.rl.PPOTrainer",  # 0.5
    "areal.experimental.trainer.sft.SFTTrainer": "areal_core.trainer.sft.SFTTrainer",
    **{f"areal.api.cli_args.{name}": f"areal_core.config.{name}" for name in CONFIGS},
    "areal.api.cli_args.vLLMConfig": "areal_core.config.VLLMConfig",
    "areal.api.io_struct.ModelRequest": "areal_core.rollout.types.ModelRequest",
    "areal.api.io_struct.ModelResponse": "areal_core.rollout.types.ModelResponse",
    "areal.api.workflow_api.RolloutWorkflow": "areal_core.rollout.workflow.RolloutWorkflow",
    "areal.api.engine_api.InferenceEngine": "areal_core.rollout.types.InferenceEngine",
    "areal.api.reward_api.AsyncRewardWrapper": "areal_core.reward.reward_pool.RewardPool",
    "areal.api.alloc_mode.AllocationMode": "areal_core.config.allocation.Allocation",  # to 1.0
    "areal.api.alloc_mode.ModelAllocation": "areal_core.config.allocation.Allocation",
    "areal.engine.sglang_remote.RemoteSGLangEngine": "areal_core.remote.RemoteEngine",
    "areal.engine.vllm_remote.RemotevLLMEngine": "areal_core.remote.RemoteEngine",
    "areal.engine.fsdp_engine.FSDPEngine": "areal_core.engine.fsdp.FSDPEngine",
    "areal.infra.workflow_executor.WorkflowExecutor": "areal_core.rollout.pipeline.Executor",
    "areal.infra.staleness_manager.StalenessManager": "areal_core.rollout.staleness.StalenessControl",
    "areal.dataset.get_custom_dataset": "areal_core.data.get_dataset",
    "areal.utils.hf_utils.load_hf_tokenizer": "areal_core.trainer.build.load_tokenizer_at",
    "areal.utils.data.concat_padded_tensors": "areal_core.data.batch.pad_and_concat",
    "areal.utils.data.pack_tensor_dict": "areal_core.data.batch.pack",
}
# By the module that defines a name; packages above it may export it, too (`defined_at`).
OURS = WORKFLOWS | REWARDS | OF_SCRIPTS


def ours(path: str) -> str:
    """Return our path of a name of upstream, with its separator; any other path unchanged."""
    is_colon = ":" in path
    found = OURS.get(defined_at(path.replace(":", ".")))
    if found is None:
        return path
    module, _, name = found.rpartition(".")
    return f"{module}:{name}" if is_colon else found


def defined_at(path: str) -> str:
    if path in OURS:
        return path
    package, _, name = path.rpartition(".")
    if package.count(".") > 1:
        return path
    return next((full for full in OURS if full.startswith(f"{package}.") and full.endswith(f".{name}")), path)


def hint_for(path: str) -> str:
    """Return the end of the message on a path of upstream that has no equivalent; "" for others."""
    dotted = path.replace(":", ".")
    if dotted.split(".")[0] not in PACKAGES or dotted in OURS:
        return ""
    similar = nearest(dotted)
    if similar is None:
        return f"; AReaL's {dotted} has no equivalent here ({PAGE})"
    return f"; AReaL's {dotted} has no equivalent here: the nearest is {OURS[similar]}, for {similar}"


def nearest(path: str) -> str | None:
    """Return the workflow, agent or reward function with an equivalent that is most like `path`.

    One of the same package is always near enough, another only with a similar name.
    """
    known = WORKFLOWS | REWARDS
    package = ".".join(path.split(".")[:2])
    same = [full for full in known if full.startswith(f"{package}.")]
    if same:
        return difflib.get_close_matches(path, same, n=1, cutoff=0)[0]
    by_name = {full.rpartition(".")[2]: full for full in known}
    alike = difflib.get_close_matches(path.rpartition(".")[2], by_name, n=1)
    return by_name[alike[0]] if alike else None


def replacements(script: str) -> Iterator[str]:
    """Yield one sentence for each import from an upstream that is not installed.

    Args:
        script: the text of a Python file; one that cannot be parsed yields nothing.
    """
    if any(find_spec(package) for package in PACKAGES):
        return
    try:
        nodes = ast.parse(script).body
    except SyntaxError:  # the run reports it with its line
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for path in paths:
            if path.split(".")[0] in PACKAGES:
                yield f"line {node.lineno}: {path}: {instead_of(path)}"


def instead_of(path: str) -> str:
    found = OURS.get(defined_at(path))
    if found is None:
        return f"no equivalent ({PAGE})"
    module, _, name = found.rpartition(".")
    return f"from {module} import {name}"
