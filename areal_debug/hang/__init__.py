"""`areal-debug hang`: collect the stacks of a job, diagnose why it hangs, watch for hangs."""
