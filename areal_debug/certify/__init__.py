"""The verb `certify`."""
