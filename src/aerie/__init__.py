"""aerie: draft heads for any Hugging Face causal LM: train, calibrate and decode with them, losslessly."""
