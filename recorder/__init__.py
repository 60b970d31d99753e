"""A record of training: versioned, checksummed, without pickle. FORMAT.md is the specification."""
