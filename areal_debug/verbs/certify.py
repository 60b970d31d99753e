"""`areal-debug certify`: are sampled log-probs those of the trainer in every bit?"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_debug.cli import Verb, force_option, json_option, output_option
from areal_debug.render import (
    announce,
    console,
    errors_as_sentences,
    fail,
    is_quiet,
    note,
    print_json,
    refuse_existing,
)

if TYPE_CHECKING:
    from consistency.exact import Certificate, Check

EMBEDDED = "embedded"


@click.command(
    cls=Verb,
    example="areal-debug certify --engine embedded --model MODEL --tokens 1000000 -o certificate.json\n"
    "areal-debug certify --engine embedded --model MODEL --against certificate.json",
)
@click.option(
    "--engine", required=True, metavar="URL|embedded", help="A server, or the engine in this process."
)
@click.option("--model", required=True, metavar="FOLDER", help="The model that the engine serves.")
@click.option(
    "--tokens",
    "num_tokens",
    type=click.IntRange(1),
    default=20_000,
    show_default=True,
    help="Least number of sampled tokens to compare.",
)
@click.option(
    "--max-new-tokens", type=click.IntRange(1), default=64, show_default=True, help="Of a completion."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Of the trainer's forward; by default the server's, or float32.",
)
@click.option(
    "--update",
    metavar="FOLDER",
    help="Checkpoint that a server loads to check a weight update, and then --model.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of prompts and sampling.")
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="CERTIFICATE",
    help="Certificate of an earlier run: exit code 1 only if this one is worse.",
)
@output_option("Write the certificate.")
@force_option
@json_option
@errors_as_sentences
def command(
    engine: str,
    model: str,
    num_tokens: int,
    max_new_tokens: int,
    dtype: str | None,
    update: str | None,
    seed: int,
    against: Path | None,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Sample from an engine in batches of 1, 8 and 64, in another order, again, from its prefix
    cache and after a weight update; compare every log-prob with the trainer's, bit for bit.

    The trainer and the embedded engine compute with actor.attn_impl=batch_invariant, on a CPU.

    Exit code 0: proven, or not worse than --against. 1: refuted, or worse. 2: bad input, or
    undecided because a check could not run.
    """
    from areal_debug.certify.render import HEADING, print_certificate, print_check
    from consistency.exact import read_certificate, worse_than

    saved = None if against is None else read_certificate(against)
    if output is not None:
        refuse_existing(output, force)
    announce(f"sampling {num_tokens:,} tokens of {engine} in each check, and computing them again")
    out, reported = console(), 0

    def report(check: "Check") -> None:
        nonlocal reported
        if as_json or is_quiet():
            return
        if reported == 0:  # bad input is one sentence, without a table
            out.print(HEADING, highlight=False)
        reported += 1
        print_check(out, check)

    certificate = run_checks(engine, model, dtype, update, report, num_tokens, max_new_tokens, seed)
    worse = None if saved is None else worse_than(certificate, saved)
    if output is not None:
        import json

        output.write_text(json.dumps(certificate.document(), indent=1) + "\n")
    if as_json:
        print_json(certificate.document() | {"worse": worse})
    else:
        print_certificate(out, certificate, worse)
        if output is not None:
            note(f"certificate written to {output}")
    if worse is not None:
        raise SystemExit(1 if worse else 0)
    raise SystemExit({"proven": 0, "refuted": 1, "undecided": 2}[certificate.verdict])


def run_checks(
    engine: str,
    model: str,
    dtype: str | None,
    update: str | None,
    report: Any,
    num_tokens: int,
    max_new_tokens: int,
    seed: int,
) -> "Certificate":
    """Certify the embedded engine or a server. Raises as `consistency.exact` does."""
    from consistency.exact import certify_embedded, certify_server

    sizes = (num_tokens, max_new_tokens, seed)
    if engine == EMBEDDED:
        if update is not None:
            fail("--update is for servers: the embedded engine loads weights that are changed in place")
        return certify_embedded(model, dtype or "float32", *sizes, report)
    from areal_core.trainer.build import load_tokenizer_at
    from consistency.exact import ServerTarget
    from consistency.live import vocabulary_of

    target = ServerTarget(engine, vocabulary_of(load_tokenizer_at(model)))
    served = target.facts["dtype"]
    of_trainer = dtype or (served if served in ("float32", "bfloat16") else "float32")
    return certify_server(target, model, of_trainer, *sizes, update, report)
