"""Record and replay TRL's trainers with their own loss and optimizer."""
