"""Special functions, series and quadrature rules."""
