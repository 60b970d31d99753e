"""Clients of inference engines over HTTP that sample and rescore completions: one file per API."""
