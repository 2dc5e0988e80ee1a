"""What threads are called that run a policy and that nobody waits for, so that the end of a program knows them; imports nothing."""

__all__ = ["POLICY_THREAD"]

# telling, and no name that a user's own thread would have: who leaves while one is alive leaves at once (`mmsdk.apps.interrupts.end`)
POLICY_THREAD = "mmsdk: a policy at work"
