"""The one comparison of two recordings of a step: stages, places, values, patterns."""
