"""The forecast of acceptance and speed."""
