"""Precision validation: what low-precision rollouts change, measured, and the gates that judge the numbers.

Importing the package imports no torch, so that the gates stay cheap.
"""
