"""Runs and recordings as tables for other tools: Parquet or JSON lines, one documented schema."""
