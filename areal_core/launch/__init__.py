"""Launchers of torchrun ranks and inference servers, with logs, exit codes and clean shutdown."""
