"""Measures what the daemon costs. Run it as ``make bench`` or ``python -m bench --help``."""
