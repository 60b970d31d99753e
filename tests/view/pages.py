"""A page of a record in the browser."""

from tests.command_line import printed


def write_page(file, *arguments):
    """Write what `areal-debug open` makes of the arguments; return its address."""
    printed("open", *arguments, "-o", file)
    return f"file://{file}"


def open_ready(page, url, **size):
    """Open a page and wait until it shows a step, without an error of a script."""
    page.open("about:blank")  # another fragment of the same page loads nothing
    page.open(url, **size)
    page.wait_for("document.body.dataset.ready")
    assert page.errors == []
