"""Which known weights an engine sampled with: all, of some tensors, a delta, of some rows."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_core.testing import make_tiny_model
from areal_debug import Recorder
from consistency.case import Request
from consistency.check import check
from consistency.source import Sampling, read_record
from recorder import open_record

ROWS, LENGTH, PROMPT = 12, 14, 3
SAMPLING = Sampling(1.0, 1.0, None, False, "float32", "bfloat16")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three checkpoints of a run: base, previous, last; every tensor moves at each update."""
    place = tmp_path_factory.mktemp("weights")
    chance = torch.Generator().manual_seed(0)
    found = {"base": make_tiny_model(place / "base", hidden_size=32, initializer_range=0.2)}
    model = AutoModelForCausalLM.from_pretrained(found["base"], dtype=torch.float32)
    for name in ("previous", "last"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=chance)
        make_tiny_model(place / name, hidden_size=32)
        model.save_pretrained(place / name)
        found[name] = place / name
    return found


def states(folders):
    models = {n: AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for n, f in folders.items()}
    return models["last"], {name: model.state_dict() for name, model in models.items()}


@torch.no_grad()
def score(model, tokens):
    logp = model(tokens).logits[:, :-1].log_softmax(-1)
    return logp.gather(-1, tokens[:, 1:, None])[..., 0][:, PROMPT - 1 :]


def sampled_by(folders, kind):
    """Return tokens and the log-probs of an engine with these weights."""
    model, known = states(folders)
    tokens = torch.randint(3, 60, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    own = {name: value.clone() for name, value in known["last"].items()}
    engine = {
        "last": own,
        "base": known["base"],
        "previous": known["previous"],
        "some tensors": own | {n: v for n, v in known["base"].items() if "layers.1.mlp" in n},
        "delta": {n: known["base"][n] + own[n] - known["previous"][n] for n in own},
        "some rows": known["previous"],
    }[kind]
    right = score(model, tokens)
    model.load_state_dict(engine)
    other = score(model, tokens)
    is_other = torch.arange(ROWS)[:, None] % (3 if kind == "some rows" else 1) == 0
    return tokens, torch.where(is_other, other, right)


@pytest.mark.parametrize(
    ("kind", "id", "says"),
    [
        ("last", None, ""),
        pytest.param(
            "base", "R32", "sampled with the base model (first or reference", marks=pytest.mark.long
        ),
        pytest.param("previous", "R24", "stale weights", marks=pytest.mark.long),
        ("some tensors", "R25", "still have the base model's values"),
        ("delta", "R24", "the last update was applied to the base model"),
        ("some rows", "R24", "some requests were answered with stale weights"),
    ],
)
def test_the_weights_are_named(folders, tmp_path, kind, id, says):
    tokens, logprobs = sampled_by(folders, kind)
    rows = [(row[:PROMPT], row[PROMPT:], own) for row, own in zip(tokens, logprobs, strict=True)]
    names = ("prompt_tokens", "completion_tokens", "logprobs")
    samples = [dict(zip(names, row, strict=True)) | {"reward": 0.0, "group": n} for n, row in enumerate(rows)]
    with Recorder(tmp_path / "r", trainer="slime") as recorder:
        recorder.step(0, samples)
    others = {name: str(folders[name]) for name in ("previous", "base")}
    request = Request(str(folders["last"]), "float32", **others)
    checked = check(read_record(open_record(tmp_path / "r"), [0], SAMPLING), request)
    # the tokens are drawn by nobody, which is another finding
    faults = [cause for cause in checked.diagnosis.causes if cause.id in ("R24", "R25", "R32")]
    assert [cause.id for cause in faults[:1]] == ([id] if id else [])
    assert not says or says in faults[0].name
    assert (checked.setting.noise.name == "float32") == (kind in ("last", "some rows"))
