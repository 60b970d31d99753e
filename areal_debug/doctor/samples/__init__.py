"""Rules over the samples of a record: each finding shows the samples that prove it."""
