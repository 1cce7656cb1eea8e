"""Conversations answered by the target itself: prompts, answers, a gate on their quality, and rows to train on."""
