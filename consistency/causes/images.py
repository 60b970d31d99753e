"""Images that engine and trainer see differently; R63, their placeholders, is found in the rows."""

from consistency.case import Case, Finding
from consistency.causes.definition import confidence, explained, replay_evidence


def other_processor(case: Case) -> Finding | None:
    """R62: the engine made other pixels of the images."""
    found = explained(case, "R62")
    if found is None:
        return None
    return Finding(
        "R62",
        f"another image processor: {found.prediction.name}",
        confidence(found),
        f"scoring with such pixels explains the engine's logprobs: {replay_evidence(found)}",
        "compare preprocessor_config.json on both sides, and the number of prompt tokens of each reply",
        "one processor on both sides: send PNG, serve the folder that the trainer loads, and set no size limits "
        "in the server's environment or options",
    )


def positions_without_grid(case: Case) -> Finding | None:
    """R64: the engine treats the tokens of images as text."""
    found = explained(case, "R64")
    if found is None:
        return None
    return Finding(
        "R64",
        "tokens of images have the positions or the causal attention of text",
        confidence(found),
        f"scoring without the types of the tokens explains the engine's logprobs: {replay_evidence(found)}",
        "score again with image_grid_thw and mm_token_type_ids (Gemma 3: token_type_ids) on both sides",
        "Qwen-VL: three rows of positions, made of the grid; Gemma 3 on SGLang: an attention backend that attends "
        "both ways inside an image (--attention-backend triton; torch_native does not)",
    )


def stale_tower(case: Case) -> Finding | None:
    """R65: the vision tower of the engine is that of another checkpoint."""
    found = explained(case, "R65")
    if found is None:
        return None
    return Finding(
        "R65",
        f"vision tower not updated in the engine: {found.prediction.name} explains its logprobs",
        confidence(found),
        replay_evidence(found),
        "compare checksums of the tower's tensors (rollout.verify_weights_every: 1)",
        "include the tower in the weight update, under the names that the engine's loader knows, or freeze it "
        "(actor.freeze_vision_tower)",
    )


def other_images(case: Case) -> Finding | None:
    """R66: rows were answered with the images of other requests."""
    found = explained(case, "R66")
    if found is None:
        return None
    return Finding(
        "R66",
        "images of other requests: the prefix cache ignores images",
        confidence(found),
        f"{found.prediction.name} explain the logprobs: {replay_evidence(found)}",
        "send the requests with the cache disabled (SGLang --disable-radix-cache): the difference must vanish",
        "key cached prefixes by the content of images, not by their placeholders; pair images with requests by id",
    )


def missing_images(case: Case) -> Finding | None:
    """R67: the engine got no images, or the images in another order."""
    found = explained(case, "R67")
    if found is None:
        return None
    return Finding(
        "R67",
        f"images lost on the way to the engine, or in another order: {found.prediction.name}",
        confidence(found),
        f"{found.prediction.name} explains the engine's logprobs: {replay_evidence(found)}",
        "log the number of images that each request carries where it arrives",
        "send image_data with every request of a prompt with images, in the order of their placeholders",
    )


CAUSES = (
    other_processor,
    positions_without_grid,
    stale_tower,
    other_images,
    missing_images,
)
