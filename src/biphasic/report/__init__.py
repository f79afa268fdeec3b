"""Reports on sweeps, studies and recipes: tables, confidence intervals and figures."""
