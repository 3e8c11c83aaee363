"""What is integrated through depth, and the loop that does it."""
