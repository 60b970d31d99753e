"""What a run's metrics say about its learning: numbers in, alarms with evidence, advice and one experiment out."""
