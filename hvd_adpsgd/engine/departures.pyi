# Nothing for Python: the engine's thread only.
