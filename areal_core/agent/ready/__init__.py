"""Agents that ship with the core, by the names that config files of AReaL use."""
