"""What a solve returns, for each kind of measure."""
