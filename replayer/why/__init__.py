"""Why two records differ: one sentence with its evidence, from the records and from replays."""
