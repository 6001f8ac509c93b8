"""The losslessness check."""
