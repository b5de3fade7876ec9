"""KV Atlas: measure, choose and use KV-cache strategies."""
