"""What `mmsdk NAME` does, one file a command: `run(args) -> exit code`. What may be said to it is in `mmsdk.apps.arguments`."""
