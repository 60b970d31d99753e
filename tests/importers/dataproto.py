"""Write DataProto files with the layout of verl and ROLL: pickles of consolidated TensorDicts."""

import io
import pickle
from pathlib import Path

import numpy as np
import torch

from .known import KNOWN, named_function, padded, pretending, stand_in

# verl and ROLL: DataProto


def consolidated_bytes(tensors):
    """`torch.save` a consolidated TensorDict: one uint8 storage with the position of each leaf."""
    rebuild = named_function("tensordict._reductions", "_rebuild_tensordict_files_consolidated")
    leaves, data = {}, b""
    for key, array in tensors.items():
        size = array.nbytes
        leaves[key] = (f"torch.{array.dtype}", tuple(array.shape), len(data), len(data) + size, 0)
        data += array.tobytes()
    metadata = {
        "leaves": leaves,
        "non_tensors": {},
        "cls": "TensorDict",
        "cls_metadata": {
            "batch_size": torch.Size([len(KNOWN)]),
            "device": None,
            "names": None,
            "is_locked": True,
        },
        "size": len(data),
    }
    storage = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    class Consolidated:
        def __reduce__(self):
            return rebuild, (metadata, storage)

    buffer = io.BytesIO()
    with pretending(rebuild=rebuild):
        torch.save(Consolidated(), buffer)
    return buffer


def pickle_proto(module, state, path, protocol=4):
    proto = stand_in(module, "DataProto")
    proto.__getstate__ = lambda self: state
    path.parent.mkdir(parents=True, exist_ok=True)
    with pretending(proto=proto):
        path.write_bytes(pickle.dumps(proto(), protocol))


def prompt_response_tensors():
    prompt_width, response_width = 4, 5
    prompts = padded([one.prompt for one in KNOWN], prompt_width, left=True)
    responses = padded([one.completion for one in KNOWN], response_width)
    attention = np.concatenate([prompts != 0, responses != 0], axis=1).astype(np.int64)
    return {
        "prompts": prompts,
        "responses": responses,
        "response_mask": padded([one.mask for one in KNOWN], response_width),
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(axis=1) - 1, 0),
    }


def verl_tensors():
    tensors = prompt_response_tensors()
    scores = np.zeros(tensors["responses"].shape, np.float32)
    for row, one in enumerate(KNOWN):
        scores[row, len(one.completion) - 1] = one.reward
    logprobs = padded([one.logprobs for one in KNOWN], 5, dtype=np.float32)
    return tensors | {"rollout_log_probs": logprobs, "rm_scores": scores}


def verl_others():
    return {
        "uid": np.array([f"uid-{one.group}" for one in KNOWN], object),
        "__num_turns__": np.full(len(KNOWN), 2, np.int32),
        "min_global_steps": np.array([3] * len(KNOWN), object),
        "max_global_steps": np.array([3] * len(KNOWN), object),
        "raw_prompt": np.array(
            [[{"role": "user", "content": one.text[0]}] for one in KNOWN] + [None], object
        )[:-1],
    }


def write_verl(folder: Path, method="torch", tensors=None, others=None) -> Path:
    tensors = verl_tensors() if tensors is None else tensors
    if method == "numpy":
        packed = (
            (len(KNOWN),),
            None,
            {
                k: (str(a.dtype), torch.Size(a.shape), a.reshape(-1).view(np.uint8))
                for k, a in tensors.items()
            },
        )
    else:
        packed = consolidated_bytes(tensors).getvalue()
    meta = {"timing": {"gen": np.float64(1.5)}, "global_steps": 7}
    path = folder / "exp_proj" / "GBS4_N2_in4_out5" / "7" / "gen_batch.dp"
    state = (packed, verl_others() if others is None else others, meta)
    pickle_proto("verl.protocol", state, path)
    (path.parent / "meta.json").write_text('{"global_steps": 7}')
    return folder


def write_roll_rlvr(folder: Path) -> Path:
    tensors = prompt_response_tensors()
    padded_mask = np.concatenate([np.zeros((4, 4), np.int64), tensors["response_mask"]], axis=1)
    logprobs = np.concatenate(
        [np.zeros((4, 3)), padded([one.logprobs for one in KNOWN], 5, dtype=np.float32)], axis=1
    )
    rewards = np.array([one.reward for one in KNOWN], np.float16)
    tensors |= {
        "response_mask": padded_mask,
        "infer_logprobs": logprobs.astype(np.float32),
        "response_level_rewards": rewards,
    }
    state = (consolidated_bytes(tensors), {"domain": np.array(["math"] * 4, object)}, None, {"metrics": {}})
    pickle_proto("roll.distributed.scheduler.protocol", state, folder / "train" / "step_000003.pkl")
    return folder


def write_roll_agentic(folder: Path) -> Path:
    width = 10
    logprobs = padded([one.full_logprobs for one in KNOWN], width, dtype=np.float32)[:, 1:]
    scores = np.zeros((4, width), np.float32)
    scores[:, 0] = [one.reward for one in KNOWN]
    tensors = {
        "input_ids": padded([one.tokens for one in KNOWN], width),
        "attention_mask": padded([[1] * len(one.tokens) for one in KNOWN], width),
        "response_mask": padded([one.full_mask for one in KNOWN], width),
        "infer_logprobs": np.ascontiguousarray(logprobs),
        "scores": scores,
    }
    groups = np.array([f"g{one.group}" for one in KNOWN], object)
    state = (consolidated_bytes(tensors), {"traj_group_id": groups}, None, {})
    pickle_proto("roll.distributed.scheduler.protocol", state, folder / "step_000003.pkl")
    return folder / "step_000003.pkl"
