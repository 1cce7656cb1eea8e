from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
