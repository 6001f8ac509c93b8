"""What a run will take, estimated before it starts: memory, and time on a GPU."""
