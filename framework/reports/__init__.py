"""Presentation of plans, comparisons, rows and runs, as text for a terminal and as HTML pages."""
