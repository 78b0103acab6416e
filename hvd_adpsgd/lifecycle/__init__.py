"""Which super learners are alive, and how a learner's process ends: signals, preemption, shutdown."""
