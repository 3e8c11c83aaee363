"""Groups of tokens that wait: separation, dwell times, clocks, plateaus, saddles."""
