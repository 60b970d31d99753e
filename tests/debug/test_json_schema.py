"""The published schemas of `--json` hold for real outputs; those of others: where they are made."""

import json

import jsonschema
import pytest

from areal_debug.sample import unpacked
from tests import json_schema


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("hang", ["--sample"]),
        ("doctor", ["{sample}"]),
        ("why", ["{record}", "{record}"]),
        ("record seam", ["{record}", "{record}"]),
        ("record coverage", ["{record}", "{data}"]),
    ],
)
def test_output_has_what_the_schema_promises(areal_debug, recorded, tmp_path, monkeypatch, verb, arguments):
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1 + 1 = ", "answer": "2"}\n')
    places = {"record": recorded, "data": data, "sample": unpacked() / "record"}
    done = areal_debug(*verb.split(), *(text.format(**places) for text in arguments), "--json")
    document = json.loads(done.stdout)
    json_schema.check(verb, document)
    with pytest.raises(jsonschema.ValidationError):
        json_schema.check(verb, document | {"verdict" if verb != "hang" else "label": 7})


def test_misuse_that_a_confined_verb_finds_is_one_sentence(areal_debug, recorded):
    done = areal_debug("record", "seam", recorded, recorded, "--at", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Error: --at is for A alone: leave it out, or B\n"
