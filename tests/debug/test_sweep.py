"""`replay --sweep`: every combination of values, checked before anything runs."""

from click.testing import CliRunner

from areal_debug.cli import main
from areal_debug.replay.sweep import settings_of


def run(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)])


def sentence(done):
    """The one sentence of an error."""
    assert done.exit_code == 2
    return done.stderr.removeprefix("Error: ").strip()


def test_a_sweep_lists_every_combination_and_checks_its_values_first(recorded):
    assert settings_of("actor.eps_clip=0.1,0.2,0.1") == ["actor.eps_clip=0.1", "actor.eps_clip=0.2"]
    assert settings_of("a.b=[1,2],[3]") == ["a.b=[1,2]", "a.b=[3]"]
    assert "give an option and its values" in sentence(run("replay", recorded, "--sweep", "actor.eps_clip"))
    wrong = run("replay", recorded, "--sweep", "actor.eps_clip=0.1,high")
    assert "actor.eps_clip" in sentence(wrong)
    assert "high" in sentence(wrong)
