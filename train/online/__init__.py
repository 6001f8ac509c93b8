"""A drafter that learns while it serves: stored states, updates, and the test before an update is used."""
