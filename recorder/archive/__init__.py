"""Archives: a record in one compressed, sharded zarr v3 store."""
