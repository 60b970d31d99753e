"""What a record should hold: the chain of its steps, and their contents."""
