# Nothing for Python: see Loop.view.
