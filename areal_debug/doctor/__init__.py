"""Diagnose learning from a run's metrics: alarms with evidence, advice and one experiment each."""
