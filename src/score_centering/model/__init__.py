"""The model: base weights by their pin, the warm start, and the W8A8 preparation."""
