"""`areal-debug record`: list, show, verify, archive, import and export records."""
