"""What tokens in space tend to: predicted, detected, and compared."""
