"""`areal-debug bisect`: find the commit that changed a record's numbers."""
