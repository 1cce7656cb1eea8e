"""Measure a method: bench, calibrate, tune, and prove that it is lossless."""
