"""The phase of a step that a stack shows."""

import pytest

from hangdoctor.collect.process import ProcState
from hangdoctor.model import Frame, Thread
from hangdoctor.slow.phases import activity_of

SITE = "/venv/lib/python3.11/site-packages/"
MAIN = Frame("<module>", "/job/train.py", 90)
BACKWARD = [
    Frame("_engine_run_backward", SITE + "torch/autograd/graph.py", 840),
    Frame("backward", SITE + "torch/autograd/__init__.py", 350),
    Frame("Tensor.backward", SITE + "torch/_tensor.py", 600),
]
CALL = Frame("Module._call_impl", SITE + "torch/nn/modules/module.py", 1790)
FETCH = Frame("_MapDatasetFetcher.fetch", SITE + "torch/utils/data/_utils/fetch.py", 52)
IMPORT = Frame("_find_and_load", "<frozen importlib._bootstrap>", 1176)
REQUEST = [
    Frame("SocketIO.readinto", "/usr/lib/python3.11/socket.py", 706),
    Frame("HTTPConnection.getresponse", "/usr/lib/python3.11/http/client.py", 1386),
]
SLEEPS = ProcState("S")


def user(name, line=10):
    return Frame(name, "/job/train.py", line)


def seen(*frames, proc=SLEEPS, faults=0, source=lambda file, line: "", others=()):
    main = Thread((*frames, MAIN), "MainThread", active=proc.state == "R")
    return activity_of((*others, main), proc, faults, source)


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ([IMPORT], "startup"),
        ([Frame("<module>", SITE + "torch/optim/adamw.py", 3), IMPORT], "startup"),
        ([Frame("init_process_group", SITE + "torch/distributed/distributed_c10d.py", 1700)], "collective"),
        ([user("build_model")], "startup"),
        ([user("Rows.__getitem__"), user("<module>"), IMPORT], "input"),  # a program that is imported
        ([user("Rows.__getitem__"), FETCH], "input"),
        ([user("read_row"), user("Rows.__getitem__"), FETCH], "input"),
        ([Frame("_try_get_data", SITE + "torch/utils/data/dataloader.py", 1200)], "input"),
        ([*REQUEST, user("Rows.__getitem__"), FETCH], "input"),
        ([Frame("_load", SITE + "torch/serialization.py", 1400), user("Rows.__getitem__"), FETCH], "input"),
        ([Frame("pil_loader", SITE + "PIL/Image.py", 3)], "input"),
        ([user("Batch.to")], "h2d"),
        ([user("move_batch_to_device")], "h2d"),
        ([Frame("send_to_device", SITE + "accelerate/utils/operations.py", 150)], "h2d"),
        ([user("Policy.forward"), CALL], "forward"),
        ([Frame("linear", SITE + "torch/nn/functional.py", 5), CALL], "forward"),
        ([user("hook"), *BACKWARD], "backward"),
        ([user("Policy.forward"), CALL, *BACKWARD], "backward"),  # activation checkpointing
        ([Frame("adamw", SITE + "torch/optim/adamw.py", 900)], "optimizer"),
        ([user("Sgd.step"), Frame("wrapper", SITE + "torch/optim/optimizer.py", 480)], "optimizer"),
        ([Frame("all_reduce", SITE + "torch/distributed/distributed_c10d.py", 2800)], "collective"),
        ([Frame("unshard", SITE + "torch/distributed/fsdp/x.py", 1), CALL], "forward"),
        ([user("collect_garbage")], "gc"),
        ([Frame("_save", SITE + "torch/serialization.py", 900), user("main")], "checkpoint"),
        (
            [
                Frame("gather_object", SITE + "torch/distributed/distributed_c10d.py", 3000),
                Frame("save", SITE + "torch/distributed/checkpoint/state_dict_saver.py", 170),
            ],
            "collective",
        ),
        ([user("compute_reward")], "reward"),
        ([*REQUEST, user("compute_reward")], "reward"),
        ([user("RewardModel.forward"), CALL, user("reward_fn")], "reward"),
        ([*REQUEST, user("sample")], "rollout"),
        ([user("prepare_batch")], "rollout"),
        ([user("Policy.forward"), CALL, user("evaluate")], "evaluation"),
        ([Frame("finish", SITE + "wandb/sdk/wandb_run.py", 8)], "logging"),
        ([Frame("compile_inner", SITE + "torch/_dynamo/convert_frame.py", 8), CALL], "compile"),
        ([user("train_reward_model")], "other"),
        ([user("main")], "other"),
    ],
)
def test_phase_of_a_stack(frames, phase):
    assert seen(*frames).phase == phase


def test_a_device_is_waited_for_only_where_there_is_one():
    gpu = ProcState("R", has_gpu=True)
    assert seen(user("main"), proc=gpu, source=lambda file, line: "x = loss.item()").phase == "device"
    assert seen(user("main"), proc=gpu, source=lambda file, line: "x = loss.item()").waits


@pytest.mark.parametrize(
    ("proc", "phase"),
    [
        (ProcState("S"), "collective"),  # DDP waits in C++ for its reduction
        (ProcState("R"), "backward"),
        (ProcState("S", autograd_runs=True), "backward"),  # kernels are launched by another thread
    ],
)
def test_a_backward_that_sleeps_in_c_waits_for_peers(proc, phase):
    assert seen(*BACKWARD, proc=proc).phase == phase
    assert seen(user("hook"), *BACKWARD, proc=proc).phase == "backward"


def test_a_main_thread_that_waits_for_a_thread_has_its_phase():
    waits = Frame("Event.wait", "/usr/lib/python3.11/threading.py", 607)
    saver = Thread((Frame("save", SITE + "torch/serialization.py", 9), user("write")), "saver")
    assert seen(waits, user("finish"), others=[saver]).phase == "checkpoint"
