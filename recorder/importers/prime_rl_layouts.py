"""The positions of prime-rl's MessagePack lists, in all versions since 0.3.

A list names neither its version nor its members. Layouts with the same number of positions differ
in the types of those that every list has.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from recorder.errors import ForeignFormat

PACKED = "input_ids loss_mask advantages inference_logprobs position_ids"
MM = "routed_experts mm_kwargs mm_token_type_ids"
OLD_MM = "routed_experts pixel_values pixel_values_shape image_grid_thw mm_token_type_ids"
STREAMS = "rl_weights ce_weights ref_kl_weights"
TEACHER = "teacher_logprobs lora_num_tokens"
MICRO_BATCHES = tuple(
    f"{PACKED} {rest}".split()
    for rest in (
        "temperature",
        "lora_num_tokens temperature",
        f"temperature {TEACHER}",
        f"temperatures {TEACHER}",
        f"temperatures {TEACHER} pixel_values image_grid_thw",
        f"temperatures {TEACHER} routed_experts pixel_values image_grid_thw",
        f"temperatures {TEACHER} routed_experts pixel_values pixel_values_shape image_grid_thw",
        f"temperatures {TEACHER} {OLD_MM}",
        f"temperatures {TEACHER} {OLD_MM} sft_loss",
        f"temperatures env_names {TEACHER} {OLD_MM} training_mode",
        f"temperatures env_names {TEACHER} {MM} training_mode",
        f"temperatures env_names {TEACHER} {MM} training_mode rewards",
        f"temperatures env_names {TEACHER} {MM} training_mode rewards run_id run_step",
        f"temperatures env_names sequence_lengths {TEACHER} {MM} training_mode rewards run_id run_step",
        f"sequence_lengths temperatures env_names {TEACHER} {MM} training_mode rewards run_id run_step",
        f"sequence_lengths temperatures env_names ref_logprobs lora_num_tokens {MM} {STREAMS} run_id run_step",
        f"sequence_lengths temperatures env_names seq_lens ref_logprobs lora_num_tokens {MM} {STREAMS} run_id run_step",
        f"sequence_lengths temperatures env_names seq_lens ref_logprobs {MM} {STREAMS}",
    )
)
SPLIT = "prompt_ids prompt_mask completion_ids completion_mask completion_logprobs"
WHOLE = "token_ids mask logprobs temperatures env_name"
SCORED = "teacher_logprobs advantage reward"
OLD_IMAGES = "pixel_values pixel_values_shape image_grid_thw routed_experts"
SAMPLES = (
    *(
        f"{SPLIT} {rest}".split()
        for rest in (
            "advantage",
            "teacher_logprobs advantage",
            SCORED,
            f"temperatures {SCORED}",
            f"temperatures {SCORED} pixel_values image_grid_thw",
            f"temperatures {SCORED} pixel_values image_grid_thw routed_experts",
            f"temperatures {SCORED} {OLD_IMAGES}",
            f"temperatures {SCORED} {OLD_IMAGES} mm_token_type_ids",
            f"temperatures {SCORED} {OLD_IMAGES} mm_token_type_ids sft_loss",
            f"temperatures env_name {SCORED} {OLD_IMAGES} mm_token_type_ids training_mode",
            f"temperatures env_name {SCORED} mm_kwargs routed_experts mm_token_type_ids training_mode",
        )
    ),
    f"{WHOLE} {SCORED} mm_kwargs routed_experts mm_token_type_ids training_mode".split(),
    f"{WHOLE} ref_logprobs mm_kwargs routed_experts mm_token_type_ids {STREAMS} advantages".split(),
)
# the items of lists, by which layouts of one length differ
TYPES: Mapping[str, type] = {
    **dict.fromkeys(("input_ids", "prompt_ids", "completion_ids", "token_ids", "position_ids"), int),
    **dict.fromkeys(("loss_mask", "prompt_mask", "completion_mask", "mask"), bool),
    **dict.fromkeys(("sequence_lengths", "seq_lens"), int),
    **dict.fromkeys(("temperatures", "teacher_logprobs", "ref_logprobs"), float),
    "env_names": str,
}
OPTIONAL = ("teacher_logprobs", "ref_logprobs")


def named(positions: Any, layouts: Sequence[Sequence[str]], where: str) -> dict[str, Any]:
    """Return the members of a list by name. Raises ForeignFormat if it fits no layout."""
    for layout in layouts:
        if isinstance(positions, list) and len(layout) == len(positions):
            members = dict(zip(layout, positions, strict=True))
            if all(fits(name, value) for name, value in members.items()):
                return members
    size = f"a list of {len(positions)} positions" if isinstance(positions, list) else "no list"
    raise ForeignFormat(f"{where} is {size}, which no known version of prime-rl writes")


def fits(name: str, value: Any) -> bool:
    """Return whether a member has its type: a list is judged by its first item."""
    if name == "env_name":
        return isinstance(value, str)
    if name == "temperature":
        return isinstance(value, int | float)
    if name not in TYPES or (value is None and name in OPTIONAL):
        return True
    kinds = (float, int) if TYPES[name] is float else (TYPES[name],)
    return isinstance(value, list) and (not value or type(value[0]) in kinds)
