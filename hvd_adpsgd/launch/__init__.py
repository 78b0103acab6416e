"""How the started processes become a job: they find each other, and make their communicators."""
