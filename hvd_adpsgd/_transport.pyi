HAS_ULFM: bool
