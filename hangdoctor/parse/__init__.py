"""Readers: every format that people keep stacks in, turned into `hangdoctor.model` dataclasses."""
