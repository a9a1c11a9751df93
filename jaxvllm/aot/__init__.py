"""Ahead-of-time compilation and sizing for chips that are not present: TPU and GPU targets, memory reports."""
