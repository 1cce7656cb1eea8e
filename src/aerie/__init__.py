"""aerie: draft heads for any Hugging Face causal LM: train, calibrate, decode losslessly, ship."""
