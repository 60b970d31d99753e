"""One readable loop per method."""
