"""Dumps of other frameworks are checked like records; options give their sampling parameters."""

import functools
import json

from consistency import transforms
from tests import json_schema
from tests.command_line import invoke

from .records import write_record


def imported(record, folder):
    """The record's tokens as slime would have left them, read back."""
    assert invoke("record", "export", record, "--format", "slime", "--to", folder / "0.pt").exit_code == 0
    assert invoke("record", "import", folder / "0.pt", "--to", folder / "imported").exit_code == 0
    return folder / "imported"


def test_imported_dump_is_checked_at_the_given_temperature(model, tmp_path):
    transform = functools.partial(transforms.at_temperature, temperature=0.7)
    dump = imported(write_record(tmp_path / "record", model, draws=transform, reports=transform), tmp_path)
    done = invoke("consistency", dump, "--model", model, "--temperature", "0.7", "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, found["verdict"], found["num_tokens"]) == (0, "healthy", 12 * 50)
    done = invoke("consistency", dump, "--model", model, "--json")
    found = json.loads(done.stdout)
    json_schema.check("consistency", found)
    assert (done.exit_code, found["causes"][0]["id"]) == (1, "R01")


def test_imported_dump_without_a_model_is_one_sentence(model, tmp_path):
    done = invoke("consistency", imported(write_record(tmp_path / "record", model), tmp_path))
    assert done.exit_code == 2
    assert "does not name the model that sampled it: give --model PATH" in done.stderr
