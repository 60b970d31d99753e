"""Readers: every common format of stacks, parsed into `hangdoctor.model` dataclasses."""
