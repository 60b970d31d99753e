"""What a record should hold: the chain of its steps, their contents, its signature."""
