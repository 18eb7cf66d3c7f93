"""What apex called contributed: each package is imported by itself."""

__all__: list[str] = []
