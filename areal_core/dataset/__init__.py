"""Datasets: JSONL files, Hugging Face datasets, and a generated arithmetic task."""
