"""From stacks of all ranks to the class of a hang, its culprits and the evidence."""
