"""The report: statistics, figures and the page."""
