"""Replies that contradict themselves or their requests are named; unknown fields are not."""

from dataclasses import replace

import pytest

from areal_core.rollout.types import Sampling
from consistency.engines import (
    VLLM,
    EngineIdentity,
    OpenAI,
    Pictures,
    Reply,
    parse_sglang_identity,
    with_pictures,
)
from consistency.errors import EngineError
from consistency.replies import find_contradictions

from ..recorder.pictured import png

PARAMS = Sampling(max_new_tokens=4)
PROMPTS = [(5, 6, 7), (8, 9)]


def decode(ids):
    return "".join(chr(90 + i) for i in ids)


def reply(number, ids, finish="length", **changes):
    full = Reply(
        output_ids=tuple(ids),
        logprobs=(-1.0,) * len(ids),
        tops=(),
        num_prompt=len(PROMPTS[number]),
        num_output=len(ids),
        ids=tuple(ids),
        text=decode(ids),
        finish=finish,
        sent_id=f"r{number}",
        returned_id=f"r{number}",
    )
    return replace(full, tops=tuple(((i, -1.0),) for i in ids), **changes)


SOUND = [reply(0, [1, 2, 3, 4]), reply(1, [6, 7, 1], finish="stop", matched=1)]


def causes(*replies):
    return [finding.id for finding in find_contradictions(PROMPTS, replies, PARAMS, decode)]


def test_sound_replies_contradict_nothing():
    assert causes(*SOUND) == []


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"returned_id": "r1"}, "R12"),
        ({"num_prompt": 4}, "R16"),
        ({"num_output": 5}, "R17"),
        ({"logprobs": (-1.0,) * 3}, "R17"),
        ({"ids": (1, 2, 3)}, "R17"),
        ({"tops": ()}, "R17"),
        ({"finish": "stop", "matched": 1}, "R17"),
        ({"ids": (1, 2, 3, 5)}, "R13"),
        ({"ids": (2, 3, 4, 9)}, "R11"),
        ({"text": decode([6, 7, 1])}, "R12"),
        ({"text": "nothing of it"}, "R13"),
        ({"tops": tuple(((i, -2.0),) for i in (1, 2, 3, 4))}, "R61"),
        ({"tops": tuple(((i, -2.0), (9, -1.0)) for i in (1, 2, 3, 4))}, "R09"),
    ],
)
def test_one_contradiction_is_named(changes, cause):
    assert causes(replace(SOUND[0], **changes), SOUND[1]) == [cause]


def test_reply_that_is_one_short_of_its_length_is_not_complete():
    short = [reply(0, [1, 2, 3]), reply(1, [6, 7, 3])]
    assert causes(*short) == ["R17"]


@pytest.mark.parametrize(
    ("info", "software"),
    [
        ({"version": "0.5.23", "engine": "embedded"}, "embedded engine with the API of SGLang 0.5.23"),
        ({"version": "0.5.23", "schedule_policy": "fcfs", "internal_states": []}, "SGLang 0.5.23"),
        (
            {"version": "0.5.23"},
            "a server with the API of SGLang (it claims version 0.5.23, without the fields of its scheduler)",
        ),
    ],
)
def test_server_is_named_by_what_it_proves(info, software):
    assert parse_sglang_identity("here", info, {"model_path": "m"}).software == software


def test_another_count_of_prompts_with_images_alone_is_an_expansion():
    other = (replace(SOUND[0], num_prompt=9), SOUND[1])
    for with_images, cause in (({0}, "R63"), ({0, 1}, "R63"), ({1}, "R16")):
        found = find_contradictions(PROMPTS, other, PARAMS, decode, frozenset(with_images))
        assert [finding.id for finding in found] == [cause]


def test_request_to_sglang_has_one_placeholder_for_each_image_of_its_prompt():
    prompt, completion = [5, 9, 9, 9, 6, 9, 9, 7], [9, 9, 8]
    payload = {"input_ids": [*prompt, *completion]}
    fields = with_pictures(payload, prompt, Pictures((png(0), png(1)), placeholder=9))
    assert fields["input_ids"] == [5, 9, 6, 9, 7, 9, 9, 8]
    assert [url.partition(",")[0] for url in fields["image_data"]] == ["data:image/png;base64"] * 2
    assert with_pictures(payload, prompt, None) == payload


@pytest.mark.parametrize("api", [VLLM, OpenAI])
def test_servers_without_images_beside_ids_are_refused(api):
    server = api("http://127.0.0.1:1", EngineIdentity("an engine", "a model"), "a model")
    pictures = Pictures((png(0),), placeholder=9)
    for ask, *given in ((server.sample, [5, 9], PARAMS), (server.rescore, [5, 9, 6], 2)):
        with pytest.raises(EngineError, match="takes no images with token ids"):
            ask(*given, pictures)
