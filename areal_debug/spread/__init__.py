"""One verb on many records, steps or settings: a task each, here or on Ray."""
