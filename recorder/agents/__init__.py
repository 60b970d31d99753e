"""What a record holds of agents' episodes beside their tokens."""
