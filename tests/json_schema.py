"""What `--json` of a verb must have: `docs/reference/json_schema.json`."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema

SCHEMA = json.loads((Path(__file__).parents[1] / "docs/reference/json_schema.json").read_text())


def check(verb: str, document: Any) -> None:
    """Raise `jsonschema.ValidationError` unless the document is what the page promises."""
    jsonschema.validate(document, {"$ref": f"#/$defs/{quote(verb)}", **SCHEMA})
