# Nothing for Python: _engine cimports it.
