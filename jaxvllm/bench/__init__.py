"""Measurements and predictions that the README's and the documents' numbers come from."""
