"""Exact attention for prefill and decode under grouped queries, with per-key statistics on request."""
