"""What all experiments share: claims, verdicts, settings, running, the report."""
