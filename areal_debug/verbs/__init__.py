"""The verbs of `areal-debug`, one file each: options, one call, one report, the exit code."""
