"""Measurement: prompt sets, the interleaved harness, metrics, tables, plots and reports."""
