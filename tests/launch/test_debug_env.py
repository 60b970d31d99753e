"""Environment presets: their variables, their effect on torch, and the list of them."""

import pytest
from click.testing import CliRunner

from areal_core.errors import ConfigError
from areal_core.launch.debug_env import PRESETS, debug_environment, make_folders
from areal_debug.verbs.train import command


def test_presets_add_up_and_name_files_of_the_run(tmp_path):
    env = debug_environment(["hang", "nccl"], tmp_path)
    assert env["NCCL_DEBUG"] == "INFO"
    assert env["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert env["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/flight_recorder/rank_"
    make_folders(env)
    assert (tmp_path / "flight_recorder").is_dir()
    assert debug_environment([], tmp_path) == {}


def test_an_unknown_preset_is_refused_with_those_that_exist(tmp_path):
    with pytest.raises(
        ConfigError, match="there is no preset 'nvcc'; expected any of nccl, distributed, hang, cuda"
    ):
        debug_environment(["nccl", "nvcc"], tmp_path)


def test_listing_explains_every_variable_and_needs_no_script():
    listed = CliRunner().invoke(command, ["--debug-env", "list"])
    assert listed.exit_code == 0
    for preset in PRESETS:
        assert preset.purpose in listed.output
        assert preset.cost in listed.output
        assert all(f"{name}={value}" in listed.output for name, value in preset.variables.items())
        assert all(preset.meaning[name] in listed.output for name in preset.variables)
