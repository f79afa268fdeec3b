"""Tables, intervals, plots."""
