"""What transformers can represent."""
