"""Where in the network engine and model diverge: the first layer and operator, on the same tokens.

    engine ──hooks──> value of each site ──┬──> reference, each operator fed with these values
                                           │      ├─ exact arithmetic: gap that it creates
                                           │      └─ the engine's dtype, rearranged: its floor
    reference run alone ───────────────────┴──> total gap: created, or inherited from the input

A site is the result of one operator in one layer (`hooks.py`). Since every operator of the
reference gets the engine's own input, an operator with a gap above its floor computes something
else, whatever came before it. `replayer.commits.layers` compares checksums of one program at two
commits.
"""
