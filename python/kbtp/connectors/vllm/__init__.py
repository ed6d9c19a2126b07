"""vLLM: `tier` is a secondary tier of its offloading, `connector` hands prefixes from prefill to decode instances."""
