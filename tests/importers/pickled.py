"""Write the pickles of slime, miles, SkyRL, xtuner and AReaL in their layouts."""

import io
import pickle
from pathlib import Path

import numpy as np
import torch

from .dataproto import consolidated_bytes
from .known import KNOWN, named_function, padded, pretending, stand_in

# slime


def slime_sample(known, index):
    return {
        "group_index": known.group,
        "index": index,
        "prompt": known.text[0],
        "tokens": known.tokens,
        "multimodal_inputs": None,
        "response": known.text[1],
        "response_length": len(known.completion),
        "label": "42",
        "reward": known.reward,
        "loss_mask": known.mask,
        "weight_versions": ["3"],
        "rollout_log_probs": known.logprobs,
        "rollout_routed_experts": None,
        "remove_sample": False,
        "status": ["completed", "truncated", "aborted"][known.finish_reason],
        "metadata": {"messages": [{"role": "user", "content": "q"}]},
        "train_metadata": None,
        "non_generation_time": 0.0,
        "spec_info": {"spec_accept_token_num": 0, "spec_draft_token_num": 0, "spec_verify_ct": 0},
    }


def write_slime(folder: Path, known=KNOWN, **changes) -> Path:
    (folder / "rollout_data").mkdir(parents=True, exist_ok=True)
    for number in (9, 10):  # so that order by number differs from order by name
        samples = [slime_sample(one, index) | changes for index, one in enumerate(known)]
        torch.save({"rollout_id": number, "samples": samples}, folder / "rollout_data" / f"{number}.pt")
    torch.save({"rollout_id": 9, "samples": []}, folder / "rollout_data" / "eval_9.pt")
    return folder


def write_miles(folder: Path) -> Path:
    adapter = stand_in("miles.utils.types", "AdapterRef")
    instance = adapter()
    instance.name = "lora"
    with pretending(adapter=adapter):
        samples = [
            slime_sample(one, index) | {"adapter": instance, "routing_key": None}
            for index, one in enumerate(KNOWN)
        ]
        torch.save(
            {"rollout_id": 0, "metadata": {"dynamic_global_batch_size": 4}, "samples": samples},
            folder / "0.pt",
        )
    return folder / "0.pt"


# SkyRL


def write_skyrl(folder: Path, lists=None, **more) -> Path:
    rebuild = named_function("skyrl.backends.skyrl_train.training_batch", "_rebuild_tensor_batch")
    batch_class = stand_in("skyrl.backends.skyrl_train.training_batch", "TrainingInputBatch", dict)
    rows = [*KNOWN, KNOWN[0]]  # the last is padding of the batch
    width, responses = 8, 5
    pads = padded([one.mask for one in rows], responses, left=True)
    pads[-1] = 0
    arrays = {
        "sequences": padded([one.tokens for one in rows], width, left=True),
        "attention_mask": padded([[1] * len(one.tokens) for one in rows], width, left=True),
        "loss_mask": pads,
        "response_mask": padded([[1] * len(one.completion) for one in rows], responses, left=True),
        "rollout_logprobs": padded([one.logprobs for one in rows], responses, left=True, dtype=np.float32),
        "advantages": padded(
            [[one.advantage] * len(one.mask) for one in rows], responses, left=True, dtype=np.float32
        ),
        **more,
    }

    def serialise(array):
        return {"format": "numpy", "data": array.tobytes(), "shape": array.shape, "dtype": str(array.dtype)}

    buffer = io.BytesIO()
    torch.save(torch.zeros(len(rows), responses, dtype=torch.bfloat16), buffer)
    batch_dict = {key: serialise(array) for key, array in arrays.items()} | {
        "values": None,
        "kl": {"format": "torch", "data": buffer.getvalue()},
        "pixel_values": {"format": "tensor_list", "items": []},
        **{name: {"format": "tensor_list", "items": items} for name, items in (lists or {}).items()},
    }
    state = {
        "batch_dict": batch_dict,
        "batch_size": len(rows),
        "device": torch.device("cpu"),
        "metadata": {
            "pad_size": 1,
            "response_length": responses,
            "policy_prompt_boundaries": [(0, 2), (2, 4)],
            "policy_mini_batch_boundaries": [(0, 4)],
            "metrics": {"avg": np.float32(0.5)},
        },
    }

    class Batch:
        def __reduce__(self):
            return rebuild, (batch_class, state)

    path = folder / "dumped_data" / "global_step_12_training_input.pkl"
    path.parent.mkdir(parents=True)
    with pretending(rebuild=rebuild, batch=batch_class):
        path.write_bytes(pickle.dumps(Batch()))
    return folder


# xtuner


def write_xtuner(folder: Path, **changes) -> Path:
    """Write groups; with `mm_info`, prompts of training have two more tokens."""
    module = "xtuner.v1.data_proto.rl_data"
    state_class, status, params = (
        stand_in(module, name) for name in ("RolloutState", "Status", "SampleParams")
    )
    status.__reduce__ = lambda self: (status, ("completed",))
    pydantic = {
        "__pydantic_extra__": None,
        "__pydantic_fields_set__": {"prompt_ids"},
        "__pydantic_private__": None,
    }

    def instance(fields):
        one = state_class()
        one.__dict__.update({"__dict__": fields, **pydantic})
        return one

    def fields_of(one):
        common = {
            "message": [{"role": "user"}],
            "sample_parms": params(),
            "state": status(),
            "reward": {"score": one.reward},
            **changes,
        }
        if 0 in one.mask:  # an agent's trace: its response_ids lack the token of the tool
            labels = [token if m else -100 for token, m in zip(one.tokens, one.full_mask, strict=True)]
            return common | {
                "prompt_ids": one.prompt,
                "response_ids": [t for t, m in zip(one.completion, one.mask, strict=True) if m],
                "finish_reason": "length",
                "extra_fields": {"input_ids": one.tokens, "labels": labels, "logprobs": one.full_logprobs},
            }
        return common | {
            "prompt_ids": one.prompt,
            "response_ids": one.completion,
            "logprobs": one.logprobs,
            "response_mask": None,
            "finish_reason": "stop",
            "response": one.text[1],
            "extra_fields": {"train_prompt_ids": one.prompt + one.prompt[-1:] * 2} if changes else {},
        }

    groups = [[instance(fields_of(one)) for one in KNOWN if one.group == group] for group in (0, 1)]
    references = {name: type(value) for name, value in changes.get("mm_info", {}).items()}
    with pretending(state=state_class, status=status, params=params, **references):
        torch.save(groups, folder / "debug_rollout_2.pt")
    return folder


# AReaL


def areal_batch(known, dtype=np.int32):
    width = max(len(one.tokens) for one in known)
    arrays = {
        "input_ids": padded([one.tokens for one in known], width, dtype=dtype),
        "attention_mask": padded([[1] * len(one.tokens) for one in known], width, dtype=bool),
        "loss_mask": padded([one.full_mask for one in known], width, dtype=dtype),
        "logprobs": padded([one.full_logprobs for one in known], width, dtype=np.float32),
        "versions": padded([[3 if m else -1 for m in one.full_mask] for one in known], width, dtype=dtype),
        "rewards": np.array([one.reward for one in known], np.float32),
    }
    return {key: torch.from_numpy(array) for key, array in arrays.items()}


def write_areal_padded(folder: Path, **more) -> Path:
    torch.save(areal_batch(KNOWN, np.int64) | more, folder / "batch_data.pt")
    return folder / "batch_data.pt"


def write_areal_list(folder: Path) -> Path:
    batches = [areal_batch([one for one in KNOWN if one.group == group]) for group in (0, 1)]
    torch.save(
        [batch | {"turn_ids": torch.zeros(2, 1, dtype=torch.int32)} for batch in batches], folder / "batch.pt"
    )
    return folder / "batch.pt"


def write_areal_tensordict(folder: Path) -> Path:
    arrays = {key: tensor.numpy() for key, tensor in areal_batch(KNOWN, np.int64).items()}
    (folder / "batch_data.pt").write_bytes(consolidated_bytes(arrays).getvalue())
    return folder / "batch_data.pt"


def write_areal_older_tensordict(folder: Path) -> Path:
    make = named_function("tensordict._reductions", "_make_td")
    tensordict = stand_in("tensordict._td", "TensorDict")
    state = {"_tensordict": areal_batch(KNOWN, np.int64), "_batch_size": torch.Size([4]), "_device": None}

    class Pickled:
        def __reduce__(self):
            return make, (tensordict, state)

    with pretending(make=make, tensordict=tensordict):
        torch.save(Pickled(), folder / "batch_data.pt")
    return folder / "batch_data.pt"
