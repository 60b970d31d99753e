"""Records from what other frameworks leave behind: one file a format."""
