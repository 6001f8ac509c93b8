"""File formats of other projects: readers and writers side by side."""
