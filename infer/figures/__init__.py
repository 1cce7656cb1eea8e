"""What the page shows of a suite: its sweeps, policies and claims, beside what the papers say."""
