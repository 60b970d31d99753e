"""`areal-debug open`: everything that a run left, as one workbench of pages."""
