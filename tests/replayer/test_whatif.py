"""What if: other options, rows and rewards, without changing the record."""

import pytest

from areal_debug.replay.report import Curve, curves_of, whatif_cells
from replayer.request import Request
from replayer.rerun import replay_and_judge
from replayer.run import replay_and_compare
from replayer.source import recorded_batch

from .conftest import digest_files


def what_if(run, last=1, **changes):
    return replay_and_judge(Request(run.path, 0, last, **changes), replay_and_compare)


def test_another_option_moves_what_depends_on_it_and_nothing_is_written(tiny_run):
    before = digest_files(tiny_run.path)
    report = what_if(tiny_run, settings=("actor.eps_clip=0.0001", "actor.optimizer.lr=0.002"))
    assert digest_files(tiny_run.path) == before
    assert (report.guarantee.kind, report.verdict.finding) == ("changed", "changed")
    assert report.verdict.exit_code == 0
    assert [d.where for d in report.set_differently.config] == ["actor.eps_clip", "actor.optimizer.lr"]
    moved = {curve.name: curve.moved for curve in curves_of(report)}
    assert moved["ppo_actor/task_reward/avg"] == 0
    assert moved["ppo_actor/update/lr"] == pytest.approx(1.0)
    assert moved["ppo_actor/update/clip_ratio/avg"] > 0
    assert next(iter(moved)) == "ppo_actor/task_reward/avg"


def test_filtered_rows_are_those_for_which_the_expression_is_true(tiny_run):
    report = what_if(tiny_run, row_filter="reward > 0.5 and len(completion) < 12")
    for result in report.steps:
        batch = recorded_batch(tiny_run.record.step(result.step), 0)
        kept = (batch["rewards"] > 0.5) & (batch["loss_mask"].sum(1) < 12)
        assert 0 < kept.sum() < len(kept)
        assert result.replayed["ppo_actor/n_seqs"] == kept.sum()
        assert result.replayed["ppo_actor/task_reward/avg"] == pytest.approx(batch["rewards"][kept].mean())


def test_an_edit_script_changes_what_is_trained_on(tiny_run, tmp_path):
    script = tmp_path / "edit.py"
    script.write_text("def edit(batch, step):\n    return batch | {'rewards': batch['rewards'] + step}\n")
    report = what_if(tiny_run, edit=str(script))
    rewards = [(r.recorded, r.replayed) for r in report.steps]
    name = "ppo_actor/task_reward/avg"
    assert [after[name] - before[name] for before, after in rewards] == pytest.approx([0, 1])


def test_rewards_are_recomputed_from_tokens_and_text_without_special_tokens(tiny_run, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def size(prompt, completions, prompt_ids, completion_ids, **row):\n"
        "    return len(completion_ids) if '<|end|>' not in completions else -100\n"
    )
    report = what_if(tiny_run, last=0, reward=f"{reward}:size")
    batch = recorded_batch(tiny_run.record.step(0), 0)
    lengths = batch["loss_mask"].sum(1).double()
    assert report.steps[0].replayed["ppo_actor/task_reward/avg"] == pytest.approx(lengths.mean().item())


def test_the_change_of_means_has_its_sign():
    def change(recorded, replayed):
        return whatif_cells(Curve("loss", tuple(recorded), tuple(replayed)))[-1]

    assert change([0.1, 0.2], [0.2, 0.16]) == "+20 %"  # whatever single steps do
    assert change([-0.1, -0.1], [-0.2, -0.1]) == "-50 %"
    assert (change([0.0], [1.0]), change([1.0], [20.0])) == ("from 0", "> 1000 %")
