"""One file a part of training, one function an alarm. A rule gets the run and gives an alarm or None; it looks at windows, not at steps."""
