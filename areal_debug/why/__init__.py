"""`areal-debug why`: one sentence that says why two records, or a record and its replay, differ."""
