"""`areal-debug consistency --exact`: are sampled log-probs those of the trainer in every bit?"""

import json
from pathlib import Path
from typing import Any, NoReturn

from areal_debug.render import announce, format_number, is_quiet, note
from areal_debug.report.model import Facts, Report, Row, Table, tone_of
from areal_debug.report.terminal import print_answer
from consistency.entry.exact import PROVEN, REFUTED, UNDECIDED, Certificate, Check, hash_model

EMBEDDED = "embedded"


def check_exact(
    engine: str, model: str, output: Path | None, as_json: bool, options: dict[str, Any]
) -> NoReturn:
    """Certify an engine; print and write the certificate, end the command."""
    announce(f"sampling {options['num_tokens']:,} tokens of {engine}, and computing them again")
    certificate = certificate_of(engine, model, options)
    if output is not None:
        output.write_text(json.dumps(certificate.document(), indent=1) + "\n")
    shown = report_of(certificate)
    print_answer(certificate.document(), shown, as_json)
    if output is not None and not as_json:
        note(f"certificate written to {output}")
    raise SystemExit(shown.exit_code)


def certificate_of(engine: str, model: str, options: dict[str, Any]) -> Certificate:
    """Certify the embedded engine or a server. Raises as `consistency.entry.exact` does."""
    from consistency.entry.exact import EmbeddedTarget, ServerTarget, certify

    def report(check: Check) -> None:
        if not is_quiet():
            note(
                f"{check.name}: {check.not_run or f'{check.num_different:,} of {check.num_tokens:,} differ'}"
            )

    dtype = options["dtype"]
    sizes = (options["num_tokens"], options["max_new_tokens"], options["seed"])
    sha256 = hash_model(Path(model))
    target: EmbeddedTarget | ServerTarget
    if engine == EMBEDDED:
        target = EmbeddedTarget(model, dtype or "float32")
    else:
        from areal_core.engine.model import load_tokenizer_at
        from consistency.live import vocabulary_of

        target = ServerTarget(engine, vocabulary_of(load_tokenizer_at(model)))
    served = target.facts["dtype"]
    of_trainer = dtype or (served if served in ("float32", "bfloat16") else "float32")
    return certify(target, model, sha256, of_trainer, *sizes, report)


def report_of(certificate: Certificate) -> Report:
    """Return the verdict, the checks, and the first difference."""
    software, total = certificate.engine["software"], f"{certificate.num_tokens:,}"
    sentences = {
        PROVEN: f"{total} tokens of the {software}, max |D| = 0: every log-prob equals the trainer's in every bit.",
        REFUTED: (
            f"{certificate.num_different:,} of {total} tokens of the {software} differ from the trainer's, by up to "
            f"{format_number(certificate.max_abs)} nats."
        ),
        UNDECIDED: f"{total} tokens of the {software} equal the trainer's, and a check did not run.",
    }
    headings = ("check", "tokens>", "different>", "max |D|>", "cached>", "")
    table = Table(headings, [cells(check) for check in certificate.checks])
    verdict, first = certificate.verdict, Facts(first_difference(certificate))
    return Report(verdict.capitalize(), sentences[verdict], tone_of(verdict), [table, first])


def cells(check: Check) -> tuple[str, ...]:
    if check.not_run is not None:
        return (check.name, *[""] * 4, f"not run: {check.not_run}")
    cached = "-" if check.cached_tokens is None else f"{check.cached_tokens:,}"
    numbers = (f"{check.num_tokens:,}", f"{check.num_different:,}", format_number(check.max_abs))
    return (check.name, *numbers, cached, "")


def first_difference(certificate: Certificate) -> list[Row]:
    """Return the first token that differs, with both values."""
    for check in certificate.checks:
        if (first := check.first) is not None:
            text = (
                f"First difference, in {check.name!r}: completion {first.row}, token {first.position} (id {first.token}): "
                f"engine {first.engine:.9g} ({first.engine.hex()}), trainer {first.trainer:.9g} ({first.trainer.hex()})"
            )
            return [Row("", text)]
    return []
