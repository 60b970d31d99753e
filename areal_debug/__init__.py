"""The areal-debug command, its pages, and the wiring of the tools into a training run."""
