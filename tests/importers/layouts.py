"""Writes the files of other frameworks, byte for byte as they lay them out, from one batch that all tests know.

Classes of the frameworks are stood in for by classes of the same name, so that the pickles name what the real ones name.
"""

import io
import json
import pickle
import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec  # prime-rl writes with it
import numpy as np
import torch


@dataclass(frozen=True)
class Known:
    """One sample. `mask`, `logprobs` and `advantage` speak of the completion."""

    group: int
    prompt: list[int]
    completion: list[int]
    mask: list[int]
    logprobs: list[float]
    reward: float
    advantage: float
    finish_reason: int = 0
    text: tuple[str, str] = field(default=("q", "a"))

    @property
    def tokens(self):
        return self.prompt + self.completion

    @property
    def full_mask(self):
        return [0] * len(self.prompt) + self.mask

    @property
    def full_logprobs(self):
        return [0.0] * len(self.prompt) + [
            value * m for value, m in zip(self.logprobs, self.mask, strict=True)
        ]


def f32(*values):
    """Numbers that float32 holds exactly."""
    return [float(np.float32(value)) for value in values]


# Two prompts with two samples each; the second sample of the first prompt holds a token of a tool.
KNOWN = [
    Known(0, [5, 6], [7, 8, 9], [1, 1, 1], f32(-0.1, -0.2, -0.3), 1.0, 0.5, text=("ab", "cde")),
    Known(0, [5, 6], [10, 11], [1, 0], f32(-1.5, -2.5), 0.0, -0.5, 1, text=("ab", "fg")),
    Known(1, [12, 13, 14], [15], [1], f32(-0.7), 1.0, 0.0, text=("hij", "k")),
    Known(
        1, [12, 13, 14], [16, 17, 18, 19], [1, 1, 1, 1], f32(-3, -4, -5, -6), 1.0, 0.0, text=("hij", "lmno")
    ),
]


@contextmanager
def pretending(**classes):
    """Registers stand-ins under the modules that their `__module__` names, as long as something is pickled."""
    added = []
    for stand_in in classes.values():
        parts = stand_in.__module__.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in sys.modules:
                sys.modules[name] = types.ModuleType(name)
                added.append(name)
        setattr(sys.modules[stand_in.__module__], stand_in.__name__, stand_in)
    yield
    for name in added:
        del sys.modules[name]


def stand_in(module, name, base=object):
    """A class that pickles as `module.name`."""
    return type(name, (base,), {"__module__": module, "__qualname__": name})


def named_function(module, name):
    """A function that pickles as `module.name`."""

    def function(*arguments):
        raise AssertionError("nothing that a pickle names is ever called")

    function.__module__, function.__name__, function.__qualname__ = module, name, name
    return function


def padded(rows, width, left=False, dtype=np.int64):
    out = np.zeros((len(rows), width), dtype)
    for number, row in enumerate(rows):
        if left:
            out[number, width - len(row) :] = row
        else:
            out[number, : len(row)] = row
    return out


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


# verl and ROLL: DataProto


def consolidated_bytes(tensors):
    """`torch.save` of a consolidated TensorDict: one uint8 storage, and where each leaf lies in it."""
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
    whole = np.concatenate([np.zeros((4, 4), np.int64), tensors["response_mask"]], axis=1)
    logprobs = np.concatenate(
        [np.zeros((4, 3)), padded([one.logprobs for one in KNOWN], 5, dtype=np.float32)], axis=1
    )
    rewards = np.array([one.reward for one in KNOWN], np.float16)
    tensors |= {
        "response_mask": whole,
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


# prime-rl


class MicroBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    temperatures: list[float]
    env_names: list[str]
    seq_lens: list[int]
    ref_logprobs: list[float] | None = None
    routed_experts: list | None = None
    mm_kwargs: dict | None = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None


def micro_batch(samples, padding=0, masked=False):
    columns = {"ids": [], "mask": [], "advantages": [], "logprobs": [], "names": []}
    for one in samples:
        size = len(one.tokens)
        columns["ids"] += one.tokens
        columns["mask"] += [bool(m) and not masked for m in one.full_mask]
        columns["advantages"] += [one.advantage] * size
        columns["logprobs"] += one.full_logprobs
        columns["names"] += ["math"] * size
    lengths = [len(one.tokens) for one in samples]
    lengths[-1] += padding
    columns["ids"] += [1] * padding
    columns["mask"] += [False] * padding
    columns["advantages"] += [0.0] * padding
    columns["logprobs"] += [0.0] * padding
    columns["names"] += [""] * padding
    total = len(columns["ids"])
    positions = [position for length in lengths for position in range(length)]
    return MicroBatch(
        columns["ids"],
        columns["mask"],
        columns["advantages"],
        columns["logprobs"],
        positions,
        lengths,
        [1.0] * total,
        columns["names"],
        lengths,
    )


def write_prime_rl(folder: Path) -> Path:
    step = folder / "rollouts" / "step_4"
    step.mkdir(parents=True)
    encode = msgspec.msgpack.Encoder().encode
    (step / "rank_0.bin").write_bytes(encode([micro_batch(KNOWN[:2], padding=3)]))
    (step / "rank_1.bin").write_bytes(encode([micro_batch(KNOWN[2:]), micro_batch(KNOWN[:1], masked=True)]))
    return folder


def write_prime_rl_export(folder: Path) -> Path:
    step = folder / "token_exports" / "step_4"
    step.mkdir(parents=True)
    with (step / "rank_0.jsonl").open("w") as file:
        for number, one in enumerate(KNOWN):
            row = {
                "schema_version": 1,
                "step": 4,
                "rank": 0,
                "micro_step": number,
                "env_name": "math",
                "token_ids": one.tokens,
                "position_ids": list(range(len(one.tokens))),
                "loss_mask": [bool(m) for m in one.full_mask],
                "advantages": [one.advantage] * len(one.tokens),
                "inference_logprobs": one.full_logprobs,
                "trainer_logprobs": one.full_logprobs,
            }
            file.write(json.dumps(row) + "\n")
    (step / "STABLE").touch()
    return folder


# JSON lines


def write_nemo_rl(folder: Path) -> Path:
    width = 9
    path = folder / "exp_001" / "train_data_step5.jsonl"
    path.parent.mkdir(parents=True)

    def fill(values):
        return list(values) + [0] * (width - len(values))

    rows = [
        {
            "content": ["".join(one.text)],
            "rewards": [one.reward],
            "input_lengths": [len(one.tokens)],
            "token_ids": [fill(one.tokens)],
            "token_loss_mask": [fill(one.full_mask)],
            "sample_loss_mask": [1.0],
            "advantages": [fill([one.advantage] * len(one.tokens))],
            "generation_logprobs": [fill(one.full_logprobs)],
            "prev_logprobs": [fill(one.full_logprobs)],
            "idx": number,
        }
        for number, one in enumerate(KNOWN)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.parent


def write_open_instruct(folder: Path) -> Path:
    (folder / "run_metadata.jsonl").write_text('{"run_name": "run", "git_commit": "0"}\n')
    rows = [
        {
            "step": step,
            "sample_idx": number,
            "prompt_idx": one.group,
            "prompt_tokens": one.prompt,
            "response_tokens": one.completion,
            "reward": one.reward,
            "advantage": one.advantage,
            "finish_reason": ["stop", "length"][one.finish_reason],
            "dataset": "gsm8k",
            "ground_truth": "42",
            "request_info": {},
            "logprobs": one.logprobs,
        }
        for step in (1, 2)
        for number, one in enumerate(KNOWN)
    ]
    (folder / "run_rollouts_000000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
    (folder / "run_rollouts_000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[5:]))
    return folder


# SkyRL


def write_skyrl(folder: Path) -> Path:
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
    }

    def serialise(array):
        return {"format": "numpy", "data": array.tobytes(), "shape": array.shape, "dtype": str(array.dtype)}

    buffer = io.BytesIO()
    torch.save(torch.zeros(len(rows), responses, dtype=torch.bfloat16), buffer)
    batch_dict = {key: serialise(array) for key, array in arrays.items()} | {
        "values": None,
        "kl": {"format": "torch", "data": buffer.getvalue()},
        "pixel_values": {"format": "tensor_list", "items": []},
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


def write_xtuner(folder: Path) -> Path:
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
            "extra_fields": {},
        }

    groups = [[instance(fields_of(one)) for one in KNOWN if one.group == group] for group in (0, 1)]
    with pretending(state=state_class, status=status, params=params):
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


def write_areal_padded(folder: Path) -> Path:
    torch.save(areal_batch(KNOWN, np.int64), folder / "batch_data.pt")
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


# text


def write_areal_text(folder: Path) -> Path:
    for number, one in enumerate(KNOWN):
        path = folder / "rollout" / "3" / f"{one.group}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        row = {
            "task_id": one.group,
            "sample_idx": number % 2,
            "seqlen": len(one.tokens),
            "prompt_len": len(one.prompt),
            "head_version": 3,
            "tail_version": 3,
            "version_rle": [[3, len(one.completion)]],
            "reward": one.reward,
            "prompt": one.text[0],
            "completion": one.text[1],
        }
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return folder


def write_verl_text(folder: Path) -> Path:
    rows = [
        {"input": one.text[0], "output": one.text[1], "gts": "42", "score": one.reward, "step": 1}
        for one in KNOWN
    ]
    (folder / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
