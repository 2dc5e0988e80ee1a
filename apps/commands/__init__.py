"""What `mmsdk NAME` does, one file a command: `run(args) -> exit code`. Arguments are declared in `mmsdk.apps.cli`."""
