"""Write what earlier and later versions of frameworks write than those of the other modules."""

import io
import json
import pickle
import tomllib
from pathlib import Path

import msgpack
import numpy as np
import torch

from . import pickled
from .dataproto import consolidated_bytes, pickle_proto, verl_tensors
from .known import KNOWN, named_function, padded, pretending, stand_in

TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
MICRO_BATCHES, SAMPLES = TABLES["micro_batches"], TABLES["samples"]
PADDING = 3


def experts(num_tokens):
    return np.arange(num_tokens * 4, dtype=np.uint8).reshape(num_tokens, 2, 2)


def micro_batch(samples, padding: int = 0, version: str = "0.8", **changes) -> list:
    """The members of a micro-batch; padding has positions of its own."""
    sizes = [len(one.tokens) for one in samples]
    total = sum(sizes)
    lengths = [*sizes[:-1], sizes[-1] + padding]
    routed = experts(total + padding)
    members = {
        "input_ids": [t for one in samples for t in one.tokens] + [1] * padding,
        "loss_mask": [bool(m) for one in samples for m in one.full_mask] + [False] * padding,
        "advantages": [one.advantage for one in samples for _ in one.tokens] + [0.0] * padding,
        "inference_logprobs": [p for one in samples for p in one.full_logprobs] + [0.0] * padding,
        "position_ids": [p for size in (*sizes, padding) for p in range(size)],
        "temperature": 1.0,
        "temperatures": [1.0] * (total + padding),
        "env_names": ["math"] * total + [""] * padding,
        "sequence_lengths": lengths,
        "seq_lens": lengths,
        "lora": [total + padding],
        "rewards": [one.reward for one in samples for _ in one.tokens] + [float("nan")] * padding,
        "ref": [-0.5] * (total + padding),
        "teacher": [-0.25] * (total + padding),
        "mode": "rl",
        "experts": [routed.tobytes(), list(routed.shape), "uint8"],
    }
    if version == "0.5":
        members["experts"] = routed[:total].tolist()  # not padded
    return [(members | changes).get(name) for name in MICRO_BATCHES[version].split()]


def write_ranks(folder: Path, *of_ranks: list[list]) -> Path:
    for rank, micro_batches in enumerate(of_ranks):
        path = folder / "rollouts" / "step_4" / f"rank_{rank}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgpack.packb(micro_batches))
    return folder


def write_micro_batches(folder: Path, version: str) -> Path:
    """Two ranks, and on the first one padding."""
    first = micro_batch(KNOWN[:2], PADDING, version)
    write_ranks(folder / "out", [first], [micro_batch(KNOWN[2:], 0, version)])
    return folder


def write_orchestrator(folder: Path, version: str) -> Path:
    rows = []
    for one in KNOWN:
        members = {
            "prompt_ids": one.prompt,
            "prompt_mask": [False] * len(one.prompt),
            "ids": one.completion,
            "mask": [bool(m) for m in one.mask],
            "logprobs": list(one.logprobs),
            "token_ids": one.tokens,
            "full_mask": [bool(m) for m in one.full_mask],
            "full_logprobs": one.full_logprobs,
            "temperatures": [1.0] * len(one.completion),
            "env_name": "math",
            "advantage": one.advantage,
            "advantages": [one.advantage] * len(one.tokens),
            "reward": one.reward,
            "mode": "rl",
        }
        rows.append([members.get(name) for name in SAMPLES[version].split()])
    name = "rollouts.bin" if version < "0.6" else "train_rollouts.bin"
    path = folder / "run_default" / "rollouts" / "step_4" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgpack.packb([rows, 1.0, 4, None] if version == "0.3" else [rows, 4, None]))
    return folder


# SkyRL up to 0.3: bytes of torch.save, responses padded on the right, plain tensors beside them


def write_old_skyrl(folder: Path) -> Path:
    module = "skyrl_train.training_batch"
    batch_class = stand_in(module, "TrainingInputBatch", dict)
    prompts, responses = 4, 5

    def saved(array):
        buffer = io.BytesIO()
        torch.save(None if array is None else torch.from_numpy(array), buffer)
        return buffer.getvalue()

    def both(prompt, response):
        left = padded(
            [getattr(one, prompt) if prompt else [1] * len(one.prompt) for one in KNOWN], prompts, True
        )
        return np.concatenate([left, padded([response(one) for one in KNOWN], responses)], axis=1)

    def of_response(values, dtype=np.float32):
        return padded([values(one) for one in KNOWN], responses, dtype=dtype)

    arrays = {
        "sequences": both("prompt", lambda one: one.completion),
        "attention_mask": both("", lambda one: [1] * len(one.completion)),
        "response_mask": of_response(lambda one: [1] * len(one.completion), np.int64),
        "loss_mask": of_response(lambda one: one.mask),
        "rollout_logprobs": of_response(lambda one: one.logprobs),
        "action_log_probs": of_response(lambda one: [-0.5] * len(one.completion)),
        "advantages": of_response(lambda one: [one.advantage] * len(one.completion)),
        "values": None,
    }
    batch = batch_class({"sequences": torch.from_numpy(arrays["sequences"])})
    batch_class.__getstate__ = lambda self: {
        "batch_dict": {key: saved(array) for key, array in arrays.items()},
        "batch_size": len(KNOWN),
        "device": torch.device("cpu"),
        "metadata": {"response_length": responses},
    }
    path = folder / "exports" / "dumped_data" / "global_step_1_training_input.pkl"
    path.parent.mkdir(parents=True)
    with pretending(batch=batch_class):
        path.write_bytes(pickle.dumps(batch))
    return folder


# verl: one file per run (0.6), prompts beside each batch (0.7, 0.8), the TransferQueue (0.9)


def proto_state(others):
    return consolidated_bytes(verl_tensors()).getvalue(), others, {}


def write_verl_single(folder: Path) -> Path:
    pickle_proto("verl.protocol", proto_state({}), folder / "exp_proj_GBS2__N2")
    return folder


def write_verl_prompts(folder: Path) -> Path:
    step = folder / "exp_proj" / "GBS2_N2_in4_out5" / "genstep_000001"
    uids = np.array(["uid-0", "uid-1"], object)
    pickle_proto("verl.protocol", proto_state({}), step / "gen_batch.dp")
    pickle_proto(
        "verl.protocol",
        (consolidated_bytes({"n": np.zeros(2)}).getvalue(), {"uid": uids}, {}),
        step / "new_batch.dp",
    )
    (step / "meta.json").write_text('{"global_steps": 1, "gen_steps": 1}')
    return folder


NON_TENSORS = {name: stand_in("tensordict.tensorclass", name) for name in ("NonTensorStack", "NonTensorData")}


def stack_of(values):
    """Create a NonTensorStack, whose items have their value in their state."""
    stack = NON_TENSORS["NonTensorStack"]()
    stack.tensordicts = []
    for value in values:
        item = NON_TENSORS["NonTensorData"]()
        item.non_tensordict = {"data": value, "_is_non_tensor": True}
        stack.tensordicts.append(item)
    return stack


def write_verl_queue(folder: Path) -> Path:
    """Two mini-batches of a step, each with rows of different lengths in nested tensors."""
    make = named_function("tensordict._reductions", "_make_td")
    tensordict = stand_in("tensordict._td", "TensorDict")
    for number in (0, 1):
        known = [one for one in KNOWN if one.group == number]

        def nested(values, dtype=torch.int64, known=known):
            rows = [torch.tensor(values(one), dtype=dtype) for one in known]
            return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

        tensors = {
            "prompts": torch.tensor([one.prompt for one in known]),  # of one length: not nested
            "responses": nested(lambda one: one.completion),
            "response_mask": nested(lambda one: one.mask),
            "rollout_log_probs": nested(lambda one: one.logprobs, torch.float32),
            "rm_scores": nested(lambda one: [0.0] * (len(one.mask) - 1) + [one.reward], torch.float32),
        }
        tensors["multi_modal_inputs"] = stack_of([{}, {"pixel_values": torch.zeros(2)}])
        state = {"_tensordict": tensors, "_batch_size": torch.Size([2]), "_device": None}
        pickled = type("Pickled", (), {"__reduce__": lambda self, state=state: (make, (tensordict, state))})
        tags = [{"status": "success", "min_global_steps": 3, "max_global_steps": 3} for _ in known]
        path = folder / "exp_proj" / "GBS2_N2_in4_out5" / "5" / str(number) / "tq_batch.pt"
        path.parent.mkdir(parents=True)
        keys = [f"uid-{one.group}_{session}_0" for session, one in enumerate(known)]
        with pretending(make=make, tensordict=tensordict, **NON_TENSORS):
            torch.save({"tensordict": pickled(), "tags": tags, "keys": keys, "global_steps": 5}, path)
        (path.parent / "meta.json").write_text("{}")
    return folder


# NeMo-RL up to 0.5: no tokens


def write_old_nemo_rl(folder: Path) -> Path:
    rows = [
        {
            "content": [list(one.text)],
            "rewards": [one.reward],
            "generation_logprobs": [one.full_logprobs],
            "prev_logprobs": [one.full_logprobs],
            "input_lengths": [len(one.tokens)],
            "idx": number,
        }
        for number, one in enumerate(KNOWN)
    ]
    path = folder / "logs" / "exp_001" / "train_data_step5.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


# slime and miles: the inputs to the loss beside the rollouts


def write_slime_training(folder: Path, per_rank: bool) -> Path:
    folder = pickled.write_slime(folder)
    samples = [
        {
            "rollout_position": number,
            "sample_index": number,
            "tokens": torch.tensor(one.tokens),
            "log_probs": torch.full((len(one.completion),), -0.5),
            "advantages": torch.full((len(one.completion),), one.advantage),
        }
        for number, one in enumerate(KNOWN)
    ]
    (folder / "train_data").mkdir()
    if not per_rank:
        document = {
            "format_version": 2,
            "rollout_id": 9,
            "rank": 0,
            "samples": samples[::-1],
            "dp_shards": [],
        }
        torch.save(document, folder / "train_data" / "9.pt")
        return folder
    for rank in (0, 1):
        rows = samples[rank::2]
        columns = {name: [row[name] for row in rows] for name in ("tokens", "log_probs", "advantages")}
        columns["sample_indices"] = [row["sample_index"] for row in rows]
        shard = {"rollout_id": 9, "rank": rank, "rollout_data": columns, "cp_rank": 0, "cp_size": 1}
        torch.save(shard, folder / "train_data" / f"9_{rank}.pt")
    return folder
