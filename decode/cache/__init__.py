"""What is kept of committed tokens: keys and values, states of recurrent layers, token ids and features."""
