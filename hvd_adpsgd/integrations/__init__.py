"""Training frameworks that train with this library; each module needs its framework installed."""
