"""From processes to a folder: find the ranks of a job, dump their stacks a few times, save facts
about them.
"""
