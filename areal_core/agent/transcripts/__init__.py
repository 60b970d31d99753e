"""The calls of an episode beside its tokens: what was asked and answered, and by which tool."""
