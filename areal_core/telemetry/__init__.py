"""Telemetry of a run: statistics, their loggers, one summary line per step, and a trace."""
