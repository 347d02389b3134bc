"""Figures, tables and the report of an experiment, from parquet and JSON alone. Importing it loads no torch."""
