"""What stored results say about which strategy to use: curves, paired comparisons, matched points. Runs no model."""
