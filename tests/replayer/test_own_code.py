"""Own code of a run: what the record names, where a replay takes it from, and what has changed."""

import copy
from dataclasses import dataclass, replace

import pytest

from areal_core.config import PPOActorConfig
from areal_core.environment import ALLOWED_CODE
from areal_core.telemetry.stats import Stats
from areal_core.trainer.computed_by import identity
from areal_core.trainer.objective import PolicyObjective, build_objective
from recorder import open_record
from recorder.testing import write_scripted_record
from replayer.commits.outside import code_differences
from replayer.compare.stages import StageDifference
from replayer.diff import judge_own_code
from replayer.errors import ReplayError
from replayer.own_code import by_name, check_own_code, compare_own_code, own_code_of, put_own_code
from replayer.request import replay_config

SOURCE = """
def gate(ratio):
    return ratio * 2.0


def loss(logprobs, entropy, batch):
    return gate(logprobs)


def unused():
    return 1
"""


@dataclass(frozen=True)
class Mine(PolicyObjective):
    beta: float = 0.5


def built(**options):
    return build_objective(PPOActorConfig(**options), lambda sums: sums, Stats(), None)


@pytest.fixture
def source(tmp_path):
    (tmp_path / "own_loss.py").write_text(SOURCE)
    return tmp_path / "own_loss.py"


@pytest.fixture
def record(tmp_path, source):
    write_scripted_record(tmp_path / "record")
    record = open_record(tmp_path / "record")
    return with_code(record, loss_fn=identity(f"{source}:loss", built()))


def with_code(record, **code):
    environment = copy.deepcopy(record.header.environment)
    environment["code"] = (environment["code"] or {}) | code
    return replace(record, header=replace(record.header, environment=environment))


def changed(record, source, text, name="loss"):
    """Return what differs once the source has another text."""
    source.write_text(text)
    now = with_code(record, loss_fn=identity(f"{source}:{name}", built()))
    (found,) = compare_own_code(record.header, now.header, is_replay=True)
    return now, found


def test_no_record_decides_which_code_runs(record, source, monkeypatch):
    monkeypatch.delenv(ALLOWED_CODE, raising=False)
    sentence = rf"computed by the loss function loss\(\) of own_loss.py, and no record .*add --code {source} .*is unchanged"
    for refused in (replay_config, check_own_code):
        with pytest.raises(ReplayError, match=sentence):
            refused(record)
    source.write_text(SOURCE.replace("2.0", "2.1"))
    with pytest.raises(ReplayError, match=r"own_loss.py has changed since"):
        check_own_code(record)
    # a path in the options alone, without an identity, is refused as well
    crafted = copy.deepcopy(record.header.config)
    crafted["actor"]["loss_fn"] = "os:system"
    plain = replace(record, header=replace(with_code(record, loss_fn=None).header, config=crafted))
    with pytest.raises(ReplayError, match=r"the loss function system\(\) of os, and no record"):
        check_own_code(plain)


@pytest.mark.parametrize("place", ["own_loss.py", ".", "moved/other_name.py"])
def test_own_code_comes_from_the_file_or_folder_that_the_user_gives(record, source, monkeypatch, place):
    (source.parent / "moved").mkdir()
    (source.parent / "moved/other_name.py").write_text(SOURCE)
    monkeypatch.setenv(ALLOWED_CODE, str(source.parent / place))
    tree = copy.deepcopy(record.header.config)
    put_own_code(tree, record, ())
    found = source if place != "moved/other_name.py" else source.parent / place
    assert tree["actor"]["loss_fn"] == f"{found}:loss"
    put_own_code(tree, record, ("actor.loss_fn=mine.py:loss",))  # that of the user is kept for the override
    assert tree["actor"]["loss_fn"] is None


def test_a_recorded_file_never_leads_out_of_the_folder_that_the_user_gives(
    record, source, monkeypatch, tmp_path
):
    (tmp_path / "inside").mkdir()
    (tmp_path / "outside.py").write_text(SOURCE)
    monkeypatch.setenv(ALLOWED_CODE, str(tmp_path / "inside"))
    own = with_code(record, loss_fn={"import_path": "outside:loss", "file": "/../outside.py"})
    with pytest.raises(ReplayError, match=r"outside.py is not at .*/inside: give its file"):
        check_own_code(own)


def test_the_function_that_differs_is_named_and_no_other(record, source):
    _, same = changed(record, source, SOURCE.replace("return 1", "return 2"))
    assert str(same) == "the loss function loss() of own_loss.py, unchanged"  # the loss does not use it
    now, found = changed(record, source, "# moved\n" + SOURCE.replace("2.0", "2.1"))
    assert (str(found), found.line) == ("the loss function loss() of own_loss.py, changed: function gate", 3)
    (difference,) = code_differences(record.header, now.header, is_replay=True)
    assert difference.what == "the loss function loss() of own_loss.py (function gate)"
    assert (difference.file, difference.line, difference.acts_from) == ("own_loss.py", 3, "loss")
    first = StageDifference("loss", "loss", 1.0, 1.1)
    assert (
        judge_own_code(record, now, first).why
        == "the loss function loss() of own_loss.py, changed: function gate"
    )
    assert judge_own_code(record, now, replace(first, stage="advantages")) is None  # it acts later
    _, found = changed(record, source, "FACTOR = 3\n" + SOURCE)
    assert found.changed == ("code outside of functions",)
    _, found = changed(record, source, SOURCE.replace("def loss", "def other"), "other")
    assert found.changed[:2] == ("loss in its place before", "function other")


def test_an_objective_that_the_script_set_is_built_again_with_its_arguments(record, tmp_path, monkeypatch):
    base = built()
    mine = Mine(base.options, base.sum_over_ranks, base.stats, beta=0.25)
    assert identity(mine, base)["import_path"].endswith("test_own_code.Mine")
    assert identity(mine, base)["arguments"] == {"beta": 0.25}
    own = with_code(record, loss_fn=None, objective=identity(mine, base))
    monkeypatch.setenv(ALLOWED_CODE, __file__)
    tree = copy.deepcopy(record.header.config)
    put_own_code(tree, own, ())
    assert tree["actor"]["objective"] == "tests.replayer.test_own_code:Mine"  # a module of a package
    assert tree["actor"]["objective_kwargs"] == {"beta": 0.25}
    # where it was imported from is no option that differs
    again = replace(own.header, config=tree, environment=record.header.environment)
    assert by_name(own.header)["actor"]["objective"] == "Mine"
    assert by_name(again)["actor"]["objective_kwargs"] == by_name(own.header)["actor"]["objective_kwargs"]


@pytest.mark.parametrize("change", ["options", "loss", "member"])
def test_an_objective_that_cannot_be_built_again_is_refused(record, change):
    base = built()
    if change == "options":
        mine = replace(base, options=PPOActorConfig(eps_clip=0.5))
    else:
        mine = Mine(
            base.options, base.sum_over_ranks, base.stats, beta=object() if change == "member" else 0.5
        )
        if change == "loss":
            object.__setattr__(mine, "loss", lambda *args: 0.0)
    own = with_code(record, loss_fn=None, objective=identity(mine, base))
    assert own_code_of(own.header)["objective"].arguments is None
    with pytest.raises(
        ReplayError, match=r"how that was built is not recorded: .*actor.objective, or replay with"
    ):
        check_own_code(own)


def test_a_record_may_name_a_lambda_of_ours_and_no_other_module(record, monkeypatch):
    monkeypatch.delenv(ALLOWED_CODE, raising=False)
    named = replace(record, header=replace(record.header, environment={"code": {}}))
    ours = "areal_core.algorithm.gae_lambda.vapo_length_adaptive_gae"
    for path, kept in ((ours, ours), ("areal_core.launch.run.keep_logs", None)):
        tree = {"actor": {"gae_lambda_fn": path}}
        put_own_code(tree, named, ())
        assert tree["actor"]["gae_lambda_fn"] == kept
