"""Importers that make records from the dumps of other frameworks: one module per format."""
