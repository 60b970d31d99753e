"""Environment presets: their variables, their effect on torch, and the list of them."""

from areal_core.launch.debug_env import debug_environment, make_folders


def test_presets_add_up_and_name_files_of_the_run(tmp_path):
    env = debug_environment(["hang", "nccl"], tmp_path)
    assert env["NCCL_DEBUG"] == "INFO"
    assert env["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert env["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/flight_recorder/rank_"
    make_folders(env)
    assert (tmp_path / "flight_recorder").is_dir()
    assert debug_environment([], tmp_path) == {}
