"""CUDA graphs of steps: what they read, their keys, capturing and replaying them."""
