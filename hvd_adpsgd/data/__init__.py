"""Dynamic data sharding: which positions of an epoch each super learner takes."""
