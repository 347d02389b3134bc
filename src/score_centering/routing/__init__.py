"""Routing replay (R3, arXiv 2510.11370): the experts a sampler chose, used again in the training forward."""
