"""Every section of a recipe as a frozen dataclass that pydantic validates."""
