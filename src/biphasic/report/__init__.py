"""Report on a sweep: tables, confidence intervals and figures."""
