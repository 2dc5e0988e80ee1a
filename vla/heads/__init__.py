"""Action heads: what the decoder knows, turned into a chunk of actions, one file per method.

A head works in the model's units: the observation's state has been normalised, and so are the actions it returns; the policy around it
knows the statistics and the robot.
"""
