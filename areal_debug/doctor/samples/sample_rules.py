"""Apply the rules over samples to a record."""

from collections.abc import Callable

from areal_debug.doctor.samples.computed import advantages_of_others, reference_is_other, weights_stand_still
from areal_debug.doctor.samples.control_tokens import control_token_spike
from areal_debug.doctor.samples.ends import are_copies, begins_twice, mask_leaves_out, reasons_contradict
from areal_debug.doctor.samples.evidence import Finding
from areal_debug.doctor.samples.lengths import length_is_paid, truncated_is_paid
from areal_debug.doctor.samples.loops import repeats_itself
from areal_debug.doctor.samples.marks import broken_format, chosen_texts, contradicts, hedges
from areal_debug.doctor.samples.phrases import magic_phrase
from areal_debug.doctor.samples.positions import differs_by_position
from areal_debug.doctor.samples.prompt_tokens import prompt_in_loss, repeated_prompts, split_groups
from areal_debug.doctor.samples.read import Rows

OF_ROWS: tuple[Callable[[Rows], Finding | None], ...] = (
    repeated_prompts,
    split_groups,
    reasons_contradict,
    are_copies,
    mask_leaves_out,
    begins_twice,
    weights_stand_still,
    advantages_of_others,
    reference_is_other,
    magic_phrase,
    length_is_paid,
    repeats_itself,
    truncated_is_paid,
    control_token_spike,
    differs_by_position,
)
OF_TEXTS: tuple[Callable[[Rows, dict[int, str]], Finding | None], ...] = (hedges, contradicts, broken_format)


def examine_samples(rows: Rows) -> list[Finding]:
    """Return what the samples of a record prove."""
    if (leak := prompt_in_loss(rows)) is not None:  # other rules would judge prompts as completions
        return [leak]
    found = [finding for rule in OF_ROWS if (finding := rule(rows)) is not None]
    texts = chosen_texts(rows)
    return found + [finding for judge in OF_TEXTS if (finding := judge(rows, texts)) is not None]
