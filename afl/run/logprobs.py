"""Interim."""
TokenLogprobs = object
def top_logprobs(*a): return []
