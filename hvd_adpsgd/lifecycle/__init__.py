"""Which learners are alive, and how a process ends: signals, preemption, shutdown."""
