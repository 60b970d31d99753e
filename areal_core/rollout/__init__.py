"""Where batches come from: engines, workflows, and the source that turns them into a batch."""
