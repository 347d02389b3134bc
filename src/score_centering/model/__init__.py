"""The model: base weights by their pin, the warm start, and the quantised preparation."""
