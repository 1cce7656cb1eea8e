"""aerie trains, calibrates, runs and ships draft heads for any Hugging Face causal LM."""
