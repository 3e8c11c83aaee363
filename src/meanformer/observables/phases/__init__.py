"""Phase diagrams: clustering of many random starts over depth and temperature."""
