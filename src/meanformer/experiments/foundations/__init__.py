"""What one layer does, and how layers become a flow."""
