"""Exporters of records to the formats of other tools: one module per format."""
