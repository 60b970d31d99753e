import pytest

from replayer.request import is_new_option_at_default


@pytest.mark.parametrize(
    ("option", "value", "recorded", "expected"),
    [
        ("actor.fsdp.compile", False, {"actor": {"fsdp": {"offload_params": False}}}, True),
        ("actor.fsdp.compile", True, {"actor": {"fsdp": {}}}, False),  # the default was not used then
        ("actor.fsdp.compile", False, {"actor": {"fsdp": {"compile": True}}}, False),
        ("actor.reward_norm", None, {"actor": {"reward_norm": {"eps": 1e-5}}}, False),
        ("actor.kl_ctl", 0.1, {"actor": {"kl_ctl": None}}, False),  # given, as nothing
        ("actor.no_such_option", None, {"actor": {}}, False),
        ("of_a_script.own", 1, {}, False),
    ],
)
def test_an_option_younger_than_a_record_differs_from_it_only_by_another_value(
    option, value, recorded, expected
):
    assert is_new_option_at_default(option, value, recorded) is expected
