"""What each label means, taught from the docstring of its own rule: the text that explains is the text beside the code."""

import difflib
import inspect

from hangdoctor.errors import HangInputError
from hangdoctor.rules.order import RULES


def labels() -> tuple[str, ...]:
    return tuple(rule.__name__.rsplit(".", 1)[-1] for rule in RULES)


def explain(label: str | None) -> str:
    """The lesson of one label, or one line for each. Raises `HangInputError` for a label that does not exist."""
    lessons = {rule.__name__.rsplit(".", 1)[-1]: inspect.getdoc(rule) or "" for rule in RULES}
    if label is None:
        width = max(map(len, lessons))
        return "\n".join(f"{name:{width}}  {text.splitlines()[0]}" for name, text in lessons.items())
    if label not in lessons:
        close = difflib.get_close_matches(label, lessons, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise HangInputError(f"No label is called {label!r}.{hint} The labels: {', '.join(lessons)}.")
    return f"{label}\n\n{lessons[label]}"
