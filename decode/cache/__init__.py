"""Storage for committed tokens: keys and values, states of recurrent layers, token ids and features."""
