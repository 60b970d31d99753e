"""What a finding means, by its id: texts of this program, of hangs, learning and log-probs."""

from typing import Any


def explain(id: str) -> dict[str, Any]:
    """Return the texts of a label of a hang, a finding of doctor or a cause of consistency.

    Fields in braces are filled in by the run that has it. Raises ValueError for another id.
    """
    from areal_debug.doctor.alarm import findings
    from consistency.causes import CAUSES
    from hangdoctor.rules.order import explain as pattern
    from hangdoctor.rules.order import labels

    if id in labels():
        return {"id": id, "of": "a hang", "explanation": pattern(id).partition("\n")[2].strip()}
    if id in findings():
        row = findings()[id]
        names = (
            "title",
            "titles",
            "variants",
            "advice",
            "experiment",
            "source",
            "quantity",
            "limit",
            "leads_to",
        )
        return {"id": id, "of": "learning", **{name: row[name] for name in names if name in row}}
    causes = [row for key, row in CAUSES.items() if key.partition(".")[0] == id]
    if causes:
        rows = [{"name": row.name, "refute": row.refute, "fix": row.fix} for row in causes]
        return {"id": id, "of": "log-probs", "causes": rows}
    raise ValueError(
        f"there is no finding {id[:80]!r}: give a label of a hang ({', '.join(labels())}), or an id such as D22, S01 or R01"
    )
